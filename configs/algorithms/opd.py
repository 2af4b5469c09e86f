"""On-policy distillation (GKD, arXiv 2306.13649): each token's advantage is a teacher's log-probability less its own.

Reverse KL on the student's own completions, by token and without a discount, as an advantage (Thinking Machines,
"On-Policy Distillation", 2025); what a token does to the KL of later ones is left out (unlike MiniLLM, arXiv
2306.08543). config.teacher names the teacher. Rewards teach nothing; they are computed for the metrics.
"""


def apply(algorithm, collection):
    algorithm.advantage, algorithm.teacher_coef = 'zeros', 1.0
    algorithm.surrogate, algorithm.weights = 'importance', 'token_mean'
    collection.gate = 'none'
