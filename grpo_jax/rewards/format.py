"""Well-formed reasoning: 1 if the completion is <think>...</think> then <answer>...</answer>, each once."""


def reward(completion, example, *, tags):
    """1.0 for the tags of these names in order, each once, with nothing but white space outside, else 0.0.

    DeepSeek-R1's format reward (arXiv 2501.12948) is that of tags think and answer.
    """
    rest = completion
    for tag in tags:
        opening, closing = f'<{tag}>', f'</{tag}>'
        rest = rest.lstrip()
        if completion.count(opening) != 1 or completion.count(closing) != 1 or not rest.startswith(opening):
            return 0.0
        rest = rest.partition(closing)[2]
    return float(not rest.strip())
