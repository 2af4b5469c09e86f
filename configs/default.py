"""Every key once. An experiment imports this file and changes a few lines; a preset changes `algorithm` only."""
import importlib
import os

from ml_collections import ConfigDict

from grpo_jax.errors import BadInput

DATA = os.environ.get('GRPO_JAX_DATA', '../shared/data')  # folder of the data sets and small models


def get_config(preset='grpo'):
    """The default config with the algorithm of configs/algorithms/<preset>.py."""
    config = ConfigDict()
    config.seed = 0                      # of sampling noise, data order and random initialization
    config.steps = 100                   # steps of the loop: rollout, reward, update

    config.model = ConfigDict()
    config.model.path = ''               # Hugging Face folder or hub name: config.json, tokenizer, weights
    config.model.random_init = False     # draw the weights instead of reading them
    config.model.dtype = 'float32'       # of computation: float32 or bfloat16; master weights are float32

    config.data = ConfigDict()
    config.data.name = 'arithmetic'      # file in grpo_jax/data
    config.data.options = ConfigDict()   # arguments of its examples()
    config.data.prompts_per_step = 32    # P
    config.data.max_prompt_tokens = 64   # Q; longer prompts are left out
    config.data.chat = False             # apply the tokenizer's chat template
    config.data.system = ''              # system message of the chat
    config.data.template = '{prompt}'    # text around the prompt

    config.rollout = ConfigDict()
    config.rollout.group_size = 8        # G, completions of a prompt
    config.rollout.max_tokens = 64       # C, the completion budget
    config.rollout.temperature = 1.0     # logprobs are those of softmax(logits / temperature)
    config.rollout.top_p = 1.0           # truncation biases training: needs accept_bias
    config.rollout.top_k = 0
    config.rollout.min_p = 0.0
    config.rollout.repetition_penalty = 1.0  # of tokens that prompt or completion hold; 1.0: none
    config.rollout.min_tokens = 0        # no stop before that many
    config.rollout.accept_bias = False   # train all the same on samples of another distribution than the policy's
    config.rollout.stop_strings = ()     # a completion ends with the token that completes one of them
    config.rollout.thinking_tokens = 0   # budget of thinking, after which its end is forced; 0: none
    config.rollout.thinking_end = '</think>'
    config.rollout.cache_gib = 0.0       # keys and values on a device; 0: all rows at full length
    config.rollout.cache_dtype = ''      # of keys and values: int8, or '' for model.dtype
    config.rollout.weights_dtype = ''    # of the sampler's matrices: int8, or '' for model.dtype

    config.reward = ConfigDict()
    config.reward.parts = (('numeric', 1.0),)  # (file in grpo_jax/rewards, weight)
    config.reward.truncated = 0.0        # added when the budget ends before a stop token
    config.reward.verifier = 'numeric'   # the part that decides correct; '' when there is none

    config.algorithm = ConfigDict()      # pieces: functions of grpo_jax/algorithms; then their numbers
    config.algorithm.advantage = 'group_norm'
    config.algorithm.ratio = 'token'
    config.algorithm.surrogate = 'clip'
    config.algorithm.kl = 'none'
    config.algorithm.weights = 'sequence_mean'
    config.algorithm.regularizer = 'none'
    config.algorithm.dead_groups = 'keep'  # groups of equal rewards: keep (advantage 0) or drop (also from the weights)
    config.algorithm.std_ddof = 1        # 1 as in TRL, verl and OpenRLHF; the papers do not say
    config.algorithm.std_eps = 1e-6
    config.algorithm.clip_low = 0.2
    config.algorithm.clip_high = 0.2
    config.algorithm.dual_clip = 3.0     # bound of the negative side's loss in units of -A
    config.algorithm.kl_coef = 0.0       # above 0 a reference policy is kept
    config.algorithm.fixed_length = 1024 # tokens that a row's sum is divided by
    config.algorithm.entropy_coef = 0.0

    config.learner = ConfigDict()
    config.learner.epochs = 1            # passes over a step's rollout
    config.learner.minibatches = 1       # optimizer updates a pass
    config.learner.microbatches = 1      # gradients that add up to one update
    config.learner.chunk = 4096          # tokens whose logits exist at once
    config.learner.remat = False         # recompute layers in the backward pass
    config.learner.max_bad_steps = 10    # skipped non-finite updates that stop the run

    config.optimizer = _optimizer(learning_rate=1e-6)

    config.supervised = ConfigDict()     # cold start on the data set's demonstrations
    config.supervised.steps = 0          # 0: none
    config.supervised.batch = 128        # demonstrations an update
    config.supervised.optimizer = _optimizer(learning_rate=1e-3)

    config.evaluation = ConfigDict()
    config.evaluation.every = 0          # steps between evaluations; 0: before and after only
    config.evaluation.prompts = 256      # of the test split
    config.evaluation.samples = 8        # k of pass@k and maj@k; drawn at rollout.temperature

    config.checkpoint = ConfigDict()
    config.checkpoint.every = 50         # steps; the last step is always saved
    config.checkpoint.keep = 2

    config.mesh = ConfigDict({'data': 1, 'fsdp': 1, 'tensor': 1})  # devices along each axis

    config.log = ConfigDict()
    config.log.rollouts = 10             # steps between dumps of completions; 0: never

    _apply(config.algorithm, preset)
    return config.lock()  # a misspelt key in an experiment is an error


def _optimizer(learning_rate):
    return ConfigDict({
        'learning_rate': learning_rate,
        'schedule': 'constant',          # after warm-up: constant, linear or cosine to zero
        'warmup': 0,                     # updates
        'b1': 0.9, 'b2': 0.95, 'eps': 1e-8,
        'weight_decay': 0.0,
        'max_grad_norm': 1.0,
    })


def _apply(algorithm, preset):
    try:
        importlib.import_module(f'configs.algorithms.{preset}').apply(algorithm)
    except ModuleNotFoundError:
        names = os.listdir(os.path.join(os.path.dirname(__file__), 'algorithms'))
        choices = ', '.join(sorted(n[:-3] for n in names if n.endswith('.py') and n[0] != '_'))
        raise BadInput('preset', preset, f'no such file in configs/algorithms; choose one of {choices}') from None
