"""On-policy distillation beside a reward: Dr. GRPO's advantage of a completion, and the teacher's of each token.

The advantages of opd and dr_grpo are added, one to one; algorithm.teacher_coef weighs the teacher. A group of equal
rewards still learns from the teacher.
"""


def apply(algorithm, collection):
    algorithm.advantage, algorithm.teacher_coef = 'group_mean', 1.0
    algorithm.surrogate, algorithm.weights = 'clip', 'token_mean'
