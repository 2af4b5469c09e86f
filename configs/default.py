"""Every key once. An experiment imports this file and changes a few lines; of `algorithm` a preset."""
import contextlib
import importlib
import inspect
import os

from ml_collections import ConfigDict

from grpo_jax import algorithms
from grpo_jax.errors import BadInput

DATA = os.environ.get('GRPO_JAX_DATA', 'data')  # folder of the data sets and small models


def get_config(preset='grpo'):
    """The default config with the algorithm of configs/algorithms/<preset>.py."""
    config = ConfigDict()
    config.seed = 0                      # of sampling noise, data order and random initialization
    config.steps = 100                   # steps of the loop: rollout, reward, update

    config.model = ConfigDict()
    config.model.path = ''               # Hugging Face folder or hub name: config.json, tokenizer, weights
    config.model.random_init = False     # draw the weights instead of reading them
    config.model.dtype = 'float32'       # of computation: float32 or bfloat16; master weights are float32

    config.model.lora = ConfigDict()     # low-rank adapters, which are trained while the model's weights are frozen
    config.model.lora.rank = 0           # of the adapters; 0: none, all weights are trained
    config.model.lora.alpha = 32.0       # an adapter's product is multiplied by alpha / rank
    config.model.lora.targets = '.*'     # regular expression of matrices: wq, wk, wv, wo, w_gate, w_up, w_down
    config.model.lora.rslora = False     # multiplied by alpha / sqrt(rank) instead
    config.model.lora.path = ''          # PEFT folder of adapters to begin with; '': new ones
    config.model.lora.base_dtype = ''    # of the frozen matrices beside adapters: int8, or '' for model.dtype

    config.data = ConfigDict()
    config.data.name = 'arithmetic'      # file in grpo_jax/data, or FILE.py of yours
    config.data.options = ConfigDict()   # arguments of its examples()
    config.data.path = ''                # Hugging Face data set, for what data.options.folder does not hold; '': none
    config.data.revision = ''            # its commit or tag, read whatever the folder holds; '': the newest
    config.data.prompts_per_step = 32    # P
    config.data.max_prompt_tokens = 64   # Q; longer prompts are left out
    config.data.chat = False             # apply the tokenizer's chat template
    config.data.system = ''              # system message of chats that have none of their own
    config.data.template = '{prompt}'    # text around the prompt, in a chat around the last message of the user
    config.data.thinking = 'auto'        # on or off: a chat template's switch of thinking; auto: as it is by itself
    config.data.strict = False           # stop at the first malformed row; else they are left out and counted

    config.rollout = ConfigDict()
    config.rollout.group_size = 8        # G, completions of a prompt
    config.rollout.max_tokens = 64       # C, the completion budget
    config.rollout.temperature = 1.0     # logprobs are those of softmax(logits / temperature)
    config.rollout.top_p = 1.0           # truncation biases training: needs accept_bias
    config.rollout.top_k = 0             # likeliest tokens that may be drawn; 0: all
    config.rollout.min_p = 0.0           # least probability of a token, as a share of the likeliest one's
    config.rollout.repetition_penalty = 1.0  # of tokens that prompt or completion hold; 1.0: none
    config.rollout.min_tokens = 0        # no stop before that many
    config.rollout.accept_bias = False   # train all the same on samples of another distribution than the policy's
    config.rollout.stop_strings = ()     # a completion ends with the token that completes one of them
    config.rollout.thinking_tokens = 0   # budget of thinking, after which its end is forced; 0: none
    config.rollout.thinking_end = '</think>'  # the text that ends it
    config.rollout.cache_gib = 0.0       # keys and values on a device; rows beyond it wait; 0: no limit
    config.rollout.cache_dtype = ''      # of keys and values: int8, or '' for model.dtype
    config.rollout.weights_dtype = ''    # of the sampler's matrices: int8, or '' for model.dtype
    config.rollout.kernels = 'auto'      # Pallas kernels prefill and decode: on, off, or auto: prefills on
                                         # TPUs, decoding on those with two cores a chip

    config.reward = ConfigDict()
    config.reward.parts = (('numeric', 1.0),)  # (file in grpo_jax/rewards or FILE.py:NAME of yours, weight)
    config.reward.options = ConfigDict({  # of rewards by name; see docs/rewards.md
        'format': {'tags': ('think', 'answer')},  # in this order, each once
        'language': {'target': 'en'},    # a language, or a script like latin
        'repetition': {'n': 3},          # words of an n-gram
        'reflection': {'phrases': ('wait', 'let me check', 'double-check'), 'cap': 3},  # cap: phrases that count
        'countdown': {'partial': 0.1},   # of an expression that misses the target
        'code': {'all_pass': True, 'timeout': 10.0, 'memory_mib': 512},  # all_pass: else the share of tests
        'model': {'folder': '', 'dtype': 'float32', 'batch': 32, 'device': 0, 'park': True,  # weights wait on the host
                  'transform': 'sigmoid', 'mean': 0.0, 'std': 1.0, 'cap': 0.0},  # cap 0: none
        'process': {'folder': '', 'dtype': 'float32', 'batch': 32, 'device': 0, 'park': True, 'aggregate': 'min',
                    'centred': False},   # centred: 2p - 1 in place of the chance p
        'overlong': {'margin': 16},      # tokens before rollout.max_tokens in which it sets in
        'cosine': {'right': (2.0, 1.0), 'wrong': (-10.0, 0.0)},  # at length 0 and at the limit
    })
    config.reward.failed = 0.0           # reward of a part that ran out of its time or memory
    config.reward.deadline = 10.0        # seconds that a part may take on a completion in a worker process
    config.reward.workers = 4            # threads that judge, and worker processes where a part needs them
    config.reward.memory_gib = 4.0       # of a worker
    config.reward.self_test = 0.02       # share of gold answers that the verifier may misjudge before the run starts
    config.reward.truncated_reward = 0.0 # added when the budget ends before a stop token
    config.reward.step_rewards = ''      # file in grpo_jax/rewards that rewards steps, for advantage process
    config.reward.steps_with_outcome = False  # the total reward is a further step, at a completion's last token
    config.reward.length_shaping = ''    # shaping by length: a function of grpo_jax/rewards/length.py
    config.reward.length_shaping_weight = 1.0  # what it is multiplied by before it is added
    config.reward.verifier = 'numeric'   # the part that decides correct; '' when there is none
    config.reward.correct_at = 1.0       # value of that part from which a completion is correct
    config.reward.by_source = ConfigDict()  # source of the data -> parts, verifier, correct_at of its own

    config.collection = ConfigDict() # what a step learns from, and which policies are beside the one that learns
    config.collection.source = 'policy'  # of completions: policy, reference (a frozen sampler), or read from the
                                         # data: demonstrations, pairs
    config.collection.gate = 'auto'      # a group is dead by outcome: all right or all wrong; reward: all rewards are
                                         # equal; none: never. auto: outcome if the verifier is paid for, else reward
    config.collection.dead_groups = 'keep'  # dead groups: keep (advantage 0), drop (also from the weights),
                                            # reweight (the others by B / (B - M)), resample, replay
    config.collection.max_draws = 10     # rollouts that resample may draw in a step
    config.collection.max_staleness = 0  # steps that groups left over by resample, or of replay, may be old
    config.collection.retire_above = 0.0    # pass rate over all its visits from which a prompt retires; 0: none
    config.collection.revisit = 0.0         # share of the places of steps that retired prompts get again
    config.collection.allocation = 'equal'  # completions of each prompt: equal, rollout.group_size; or so many on the
                                            # average: pass_rate, most for those whose groups may then differ; or
                                            # uncertainty, in rounds, most where it takes most off (XRPO)
    config.collection.allocation_unit = 2   # completions that a prompt gets at a time, unless allocation is equal
    config.collection.exploration = 1.0     # weight of few completions beside the uncertainty that more take off
    config.collection.seeding = 0           # solved prompts of a step that are written before an unsolved one
    config.collection.reference = 'frozen'  # or hard (the policy, every reference_every steps), polyak (a share of it)
    config.collection.reference_every = 0   # steps between two renewals of the reference; of hard and polyak
    config.collection.reference_mix = 0.6   # share of the policy in polyak

    config.reference = ConfigDict()  # the policy that a KL term keeps the learning one near to
    config.reference.path = ''           # folder or hub name of a model, workdir or checkpoint of a run, that it begins
                                         # as; '': the policy that the run begins with

    config.teacher = ConfigDict()    # a model whose logprobs of the policy's own completions are learned from
    config.teacher.path = ''             # folder or hub name of a model with the policy's tokenizer; '': none
    config.teacher.dtype = 'float32'     # of its computation: float32 or bfloat16; its weights are float32
    config.teacher.park = False          # its weights wait in the hosts' memory until they are used

    config.algorithm = ConfigDict()  # pieces: functions of grpo_jax/algorithms; then their numbers
    config.algorithm.advantage = 'group_norm'
    config.algorithm.ratio = 'token'
    config.algorithm.ratio_base = 'old'  # what the ratio is taken to: old, or sampler (then without a correction)
    config.algorithm.surrogate = 'clip'
    config.algorithm.weights = 'sequence_mean'
    config.algorithm.denominator = 'all' # tokens that the weights count: all, or selected (and corrected to above 0)
    config.algorithm.correction = 'none' # against logprobs of the sampler that differ from the learner's
    config.algorithm.selection = 'all_tokens'
    config.algorithm.kl = 'none'
    config.algorithm.kl_placement = 'loss'  # loss; reward_sequence, off a completion's reward; reward_token, off each
                                         # token's reward, or off its advantage where that is of the whole completion
    config.algorithm.kl_corrected = False   # the correction also weighs the KL term of the loss
    config.algorithm.regularizers = ()
    config.algorithm.std_ddof = 1           # 1 as in TRL, verl and OpenRLHF; the papers do not say
    config.algorithm.std_eps = 1e-6
    config.algorithm.advantage_clip = 0.0   # bound of |A|; 0: none
    config.algorithm.baseline = 0.0         # of advantage reward
    config.algorithm.baseline_decay = 0.9   # of advantages moving_mean, prompt_moving_mean: what a reward counts beside
                                            # the next one; 1: the mean of all; 0: the newest alone
    config.algorithm.discount = 1.0         # gamma by token
    config.algorithm.gae_lambda = 0.95
    config.algorithm.critic_lambda = 0.95   # of the returns that the critic learns
    config.algorithm.critic_warmup = 0      # steps at the start in which the critic learns alone
    config.algorithm.value_clip = 0.2       # how far a value may move in a step without more loss; 0: any
    config.algorithm.length_alpha = 0.05    # of advantage gae_by_length
    config.algorithm.pass_k = 4             # k of advantage pkpo
    config.algorithm.efficient_share = 0.2  # of groups whose rewards fall with length, advantage grpo_lambda
    config.algorithm.efficient_alpha = 0.2
    config.algorithm.sharpen = 1.0          # of advantage xrpo_sharpen
    config.algorithm.sharpen_cap = 0.5
    config.algorithm.entropy_penalty = 0.1  # of advantage gtpo
    config.algorithm.entropy_cut = 0.6931   # ln 2
    config.algorithm.clip_low = 0.2
    config.algorithm.clip_high = 0.2
    config.algorithm.dual_clip = 3.0        # bound of the negative side's loss in units of -A
    config.algorithm.log_clip = 0.4         # of ratio clipped_geometric
    config.algorithm.cispo_cap = 5.0        # absolute, not 1 + epsilon
    config.algorithm.sapo_positive = 1.0    # temperatures
    config.algorithm.sapo_negative = 1.05
    config.algorithm.dppo_low = 0.2         # distance of probabilities
    config.algorithm.dppo_high = 0.2
    config.algorithm.vespo_powers = (2.0, 3.0)  # for positive and negative advantages
    config.algorithm.vespo_rates = (3.0, 2.0)
    config.algorithm.dpo_beta = 0.1
    config.algorithm.dpo_length_norm = False
    config.algorithm.rho_max = 2.0          # of corrections truncated and truncated_product
    config.algorithm.icepop_low = 0.5
    config.algorithm.icepop_high = 5.0
    config.algorithm.product_max = 3.0      # of correction masked_product
    config.algorithm.geometric_low = 0.999  # of correction masked_geometric
    config.algorithm.geometric_high = 1.002
    config.algorithm.veto_below = 1e-4
    config.algorithm.opsm_delta = 0.5
    config.algorithm.entropy_share = 0.2    # of selection high_entropy
    config.algorithm.second_moment = 0.04   # of selection m2po
    config.algorithm.covariance_low = 1.0   # of selection clip_cov
    config.algorithm.covariance_high = 5.0
    config.algorithm.covariance_share = 2e-4  # of tokens, for clip_cov and kl_cov
    config.algorithm.kl_coef = 0.0          # above 0 a reference policy is kept
    config.algorithm.kl_target = 0.0        # nats a token that kl_coef adapts to; 0: constant
    config.algorithm.kl_horizon = 10000.0   # completions in which it may double or halve, about
    config.algorithm.fixed_length = 1024    # tokens that a row's sum is divided by
    config.algorithm.loss_denominator = 1024.0  # of weights constant
    config.algorithm.entropy_coef = 0.0     # of regularizer entropy_bonus
    config.algorithm.entropy_target = 0.0   # nats that entropy_coef adapts to; 0: constant
    config.algorithm.entropy_delta = 0.005  # its change a step
    config.algorithm.teacher_coef = 0.0     # of a teacher's logprob less the policy's, added to each token's advantage
    config.algorithm.teacher_top_k = 0      # of regularizer distill: likeliest tokens that its KL sums over; 0: the
                                            # sampled token alone
    config.algorithm.distill_coef = 1.0
    config.algorithm.llds_coef = 0.2
    config.algorithm.positive_nll_coef = 0.1
    config.algorithm.behaviour_coef = 1e-3
    config.algorithm.kl_cov_coef = 1.0

    for name, value in algorithms.default_numbers().items():  # of new pieces, whose signatures are enough
        if name not in config.algorithm:
            config.algorithm[name] = value

    config.learner = ConfigDict()
    config.learner.epochs = 1            # passes over a step's rollout
    config.learner.minibatches = 1       # optimizer updates a pass
    config.learner.microbatches = 1      # gradients that add up to one update, of padded rows; above 1 rows are padded
    config.learner.pack_columns = -1     # tokens of a packed row: prompts once, their completions behind; -1: chosen
                                         # by the step's sizes; 0: rows are padded; above 0 `microbatches` cuts a
                                         # critic's rows alone
    config.learner.pack_rows = 1         # packed rows of a microbatch on each device
    config.learner.chunk = 0             # tokens whose logits exist at once, at most; 0: as many as take a 32nd of a
                                         # chip's memory, from 128 to 4096
    config.learner.attention = 'auto'    # splash: in kernels, whose scores stay on the chip; xla; auto: splash on TPUs,
                                         # cuDNN's kernels on NVIDIA GPUs, where they can
    config.learner.remat = 'none'        # computed again in the backward pass: none; dots (all of a layer but products
                                         # with weights), full (whole layers)
    config.learner.offload = ()          # waits in the hosts' memory until it is used: optimizer, reference
    config.learner.old_logprobs = 'forward'  # of a step's rollout: forward, in one pass; decode, by the sampler's
                                         # programs again, token by token, bit-equal to the sampler's own
    config.learner.max_bad_steps = 10    # more non-finite updates than this, in the whole run, stop it

    config.optimizer = _optimizer(learning_rate=1e-6)
    config.critic_optimizer = _optimizer(learning_rate=1e-5)  # of algorithms with a critic

    config.supervised = ConfigDict() # cold start on the data set's demonstrations
    config.supervised.updates = 0        # 0: none
    config.supervised.batch = 128        # demonstrations an update
    config.supervised.optimizer = _optimizer(learning_rate=1e-3)

    config.reward_model = ConfigDict()   # trained by grpo_jax.reward_model, with the numbers of supervised
    config.reward_model.objective = 'pairwise'  # pairwise, pointwise, steps
    config.reward_model.separator = '\n'  # between steps
    config.reward_model.replay = 0.1     # share of older rollouts that grpo-jax iterate trains it on
    config.reward_model.after_error = 'masked'  # steps after the first wrong one: masked, or wrong

    config.evaluation = ConfigDict()
    config.evaluation.every = 0          # steps between evaluations; 0: before and after only
    config.evaluation.prompts = 256      # of the test split
    config.evaluation.samples = 8        # k of pass@k and maj@k; drawn at rollout.temperature

    config.checkpoint = ConfigDict()
    config.checkpoint.every = 50         # steps; the last step is always saved
    config.checkpoint.keep = 2           # the newest ones; older ones are deleted

    config.mesh = ConfigDict({'data': 1, 'fsdp': 1, 'context': 1, 'tensor': 1})  # devices along each axis; 1: not cut

    config.diagnose = ConfigDict()   # monitors of the metrics; docs/troubleshooting.md has what they see
    config.diagnose.on = 'say'           # what a diagnosis does besides: say, save (a checkpoint), stop, or off
    config.diagnose.window = 10          # steps over which a mean is taken, and compared with earlier ones
    config.diagnose.patience = 3         # steps in a row that a state must last
    config.diagnose.repeat_after = 20    # steps for which a diagnosis must have been gone before it is said again
    config.diagnose.dead_share = 0.9     # of groups; DAPO (2503.14476) shows them growing; the demo ends with 0.8
    config.diagnose.truncated = 0.25     # of completions
    config.diagnose.entropy_share = 0.05  # of the first step's entropy (2505.22617: gains end as it is used up)
    config.diagnose.entropy_floor = 0.01  # nats, where that is more
    config.diagnose.repetitive = 0.2     # of completions, and twice as many as at the start
    config.diagnose.language_mixed = 0.1  # of completions, and twice as many as at the start (R1, 2501.12948)
    config.diagnose.kl_token = 0.5       # nats a token; 1e-3 to 1e-1 is usual
    config.diagnose.kl_sequence = 10.0   # nats a completion; lecture notes name 5 to 10
    config.diagnose.length_growth = 1.3  # factor
    config.diagnose.length_correlation = 0.3  # of reward and length within groups
    config.diagnose.part_growth = 0.5    # of a part of the reward, in standard deviations of the reward
    config.diagnose.gain = 0.02          # of accuracy: what is less is no gain
    config.diagnose.variance_share = 0.1  # of the first steps' variance of advantages
    config.diagnose.displacement = 0.1   # nats a token that right completions have lost (2410.08847, 2512.04220)
    config.diagnose.sampler_gap = 0.02   # nats a token; bfloat16 has some 0.004, float32 below 0.001
    config.diagnose.sampler_ess = 0.5    # effective sample size of the correction's weights, as a share
    config.diagnose.clip_share = 0.3     # of tokens; GSPO has some 0.15, others two orders of magnitude less
    config.diagnose.gradient_spike = 10.0  # in medians of the steps before
    config.diagnose.reward_failures = 0.05  # of completions whose reward died, expired or cannot be told
    config.diagnose.evaluation_drop = 0.05  # of pass@1, and more than two standard errors
    config.diagnose.generalization_gap = 0.2  # by which accuracy in training leaves pass@1 behind
    config.diagnose.retired = 0.9        # of prompts

    config.log = ConfigDict()
    config.log.rollouts = 10             # steps between dumps of completions; 0: never
    config.log.kl_observe = 0            # steps between looks at the KL to a reference that no penalty needs, which is
                                         # kept for it; the policy learns the same; 0: never
    config.log.probe_every = 10          # steps between looks at the probe: a few prompts with their first right
                                         # completions, which must not become unlikely; 0: never
    config.log.probe_prompts = 16        # of the train split, in the probe
    config.log.trackers = ()             # besides the files and TensorBoard: wandb, trackio
    config.log.project = 'grpo_jax'      # of the trackers
    config.log.hang_after = 0.0          # seconds that a step may take before the run ends with all stacks; 0: any

    _apply(config, preset)
    return config.lock()  # a misspelt key in an experiment is an error


def _optimizer(learning_rate):
    return ConfigDict({
        'learning_rate': learning_rate,  # after warm-up
        'schedule': 'constant',          # after warm-up: constant, linear or cosine to zero
        'warmup': 0,                     # updates
        'b1': 0.9, 'b2': 0.95, 'eps': 1e-8,  # of AdamW
        'weight_decay': 0.0,             # of AdamW, on every parameter
        'max_grad_norm': 1.0,            # longer gradients are scaled down to it
    })


def _apply(config, preset):
    """Puts a preset on the config: its apply names the sections that it changes, algorithm and perhaps collection."""
    apply = None
    if preset.isidentifier():
        with contextlib.suppress(ModuleNotFoundError):
            apply = importlib.import_module(f'grpo_jax.configs.algorithms.{preset}').apply
    if apply is None:
        names = os.listdir(os.path.join(os.path.dirname(__file__), 'algorithms'))
        choices = ', '.join(sorted(n[:-3] for n in names if n.endswith('.py') and n[0] != '_'))
        raise BadInput('preset', preset, f'no such file in configs/algorithms; choose one of {choices}')
    apply(**{name: config[name] for name in inspect.signature(apply).parameters})
