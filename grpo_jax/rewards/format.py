"""Well-formed reasoning: 1 if the completion is <think>...</think> then <answer>...</answer>, each once."""
import re

SHAPE = re.compile(r'\s*<think>(.*)</think>\s*<answer>(.*)</answer>\s*', re.DOTALL)
TAGS = ('<think>', '</think>', '<answer>', '</answer>')


def reward(completion, example):
    """1.0 for the exact structure with each tag once (DeepSeek-R1's format reward, arXiv 2501.12948), else 0.0."""
    return float(all(completion.count(tag) == 1 for tag in TAGS) and SHAPE.fullmatch(completion) is not None)
