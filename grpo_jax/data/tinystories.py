"""Stories to be finished with a requested word: the prompt is `<word>. <story so far>`, the answer the word."""

from grpo_jax.types import Example

STORIES = (
    'Lily and Tom played in the park all day. Then it was time to go home. They were tired but happy.',
    'Tim said sorry to his mom. His mom gave him a big hug.',
    'The little bird found its way back home. Its mom was very happy to see it.',
    'Ben shared his lunch with his friend. They became best friends.',
    'Mia learned that it is good to help others.',
    'The bear was not sad any more. He thanked his friends.',
)
WORDS = (
    'dog cat ball tree car cake fish hat box toy bird flower book bear boat apple rain sun moon frog duck key door bed'
).split()


def examples(split: str) -> list[Example]:
    """An Example for every word with every story; the last story is held out as the test split."""
    examples = [
        Example(f'{word}. {story}', word, i * len(STORIES) + j, {})
        for i, word in enumerate(WORDS)
        for j, story in enumerate(STORIES)
    ]
    return [e for e in examples if (e.id % len(STORIES) == len(STORIES) - 1) == (split == 'test')]
