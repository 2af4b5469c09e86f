"""On-policy distillation: a teacher's log-probability less the policy's is the advantage of each sampled token.

Reverse KL on the student's own completions, by token and without a discount (Thinking Machines, "On-Policy
Distillation", 2025; of the KL of a step alone, unlike MiniLLM, arXiv 2306.08543). config.teacher names the teacher.
Rewards teach nothing; they are computed for the metrics.
"""


def apply(algorithm, collection):
    algorithm.advantage, algorithm.teacher_coef = 'zeros', 1.0
    algorithm.surrogate, algorithm.weights = 'importance', 'token_mean'
    collection.gate = 'none'
