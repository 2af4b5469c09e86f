"""The defaults of all keys, with a list of keys that are often changed. An experiment imports this and changes a few.

A key is a field of its section's type, with its values, default and meaning: `Keys` of grpo_jax/run/settings.py names
the types. A number of an algorithm's piece is an argument of the piece. docs/config.md has every key, and the whole
meaning where a comment here ends with "...".
"""
import contextlib
import difflib
import importlib
import inspect
import os

from ml_collections import ConfigDict

from grpo_jax import user_files
from grpo_jax.errors import BadInput
from grpo_jax.run import settings

DATA = os.environ.get('GRPO_JAX_DATA', 'data')  # folder of the data sets and small models


def get_config(preset='grpo'):
    """The default config with the algorithm of a preset: of configs/algorithms/<preset>.py, or FILE.py of yours."""
    config = ConfigDict(settings.default_config())  # every key, as its field says; some are shown again
    config.seed = 0                      # of sampling noise, data order and random initialization
    config.steps = 100                   # steps of the loop: rollout, reward, update

    config.model.path = ''               # Hugging Face folder or hub name: config.json, tokenizer, weights
    config.model.random_init = False     # draw the weights instead of reading them
    config.model.dtype = 'float32'       # of computation: float32 or bfloat16; master weights are float32
    config.model.lora.rank = 0           # rank of adapters; 0: none, all weights are trained
    config.model.lora.alpha = 32.0       # an adapter's product is multiplied by alpha / rank

    config.data.name = 'arithmetic'      # file in grpo_jax/data, or FILE.py of yours
    config.data.options = {}             # arguments of the data set's examples()
    config.data.path = ''                # Hugging Face data set, read where data.options.folder has no file of it ...
    config.data.prompts_per_step = 32    # P, prompts of a step
    config.data.epochs = 0.0             # passes over the train split, which set the number of steps; 0: ...
    config.data.max_prompt_tokens = 64   # Q, columns of a prompt; longer prompts are left out
    config.data.chat = False             # apply the tokenizer's chat template
    config.data.held_out = 0.0           # share of train_split that is evaluated on in place of test_split ...
    config.data.system = ''              # system message of chats that have none of their own ...
    config.data.template = '{prompt}'    # text around the prompt, in a chat around the last message of the user ...
    config.data.thinking = 'auto'        # on or off: sets a chat template's switch of thinking; auto: leaves ...

    config.rollout.group_size = 8        # G, completions of a prompt
    config.rollout.max_tokens = 64       # C, the completion budget
    config.rollout.temperature = 1.0     # logits are divided by it before softmax, also for logprobs
    config.rollout.top_p = 1.0           # probability of the tokens that may be drawn, the likeliest first ...
    config.rollout.stop_strings = ()     # a completion ends with the token that completes one of them
    config.rollout.thinking_tokens = 0   # tokens of a completion after which open thinking is ended by force; 0: never
    config.rollout.cache_gib = 0.0       # GiB for keys and values on a device; rows beyond them wait; 0: no limit

    config.reward.parts = (('numeric', 1.0),)  # (file in grpo_jax/rewards or FILE.py:NAME of yours, weight)
    config.reward.verifier = 'numeric'   # the part that decides correct; '' when there is none
    config.reward.truncated_reward = 0.0  # added when the budget ends before a stop token
    config.reward.length_shaping = ''    # shaping by length: a function of grpo_jax/rewards/length.py
    config.reward.step_rewards = ''      # file in grpo_jax/rewards that rewards steps, for advantage process
    config.reward.deadline = 10.0        # seconds that a part may take on a completion in a worker process
    config.reward.workers = 4            # threads that judge, and worker processes where a part needs them
    config.reward.options = ConfigDict({  # of rewards by name; see docs/rewards.md
        'format': {'tags': ('think', 'answer')},  # in this order, each once
        'language': {'target': 'en'},    # a language, or a script like latin
        'repetition': {'n': 3},          # words of an n-gram
        'reflection': {'phrases': ('wait', 'aha', 'actually', 'let me check', 'let me re-check', 'double-check',
                                   'this calculation seems wrong'), 'cap': 3},  # cap: phrases that count
        'countdown': {'partial': 0.1},   # of an expression that misses the target
        'code': {'all_pass': True, 'timeout': 10.0, 'memory_mib': 512},  # all_pass: else partial credit
        'model': {'folder': '', 'dtype': 'float32', 'batch': 32, 'device': 0, 'park': True,  # weights wait on the host
                  'transform': 'sigmoid', 'mean': 0.0, 'std': 1.0, 'cap': 0.0},  # cap 0: none
        'process': {'folder': '', 'dtype': 'float32', 'batch': 32, 'device': 0, 'park': True, 'aggregate': 'min',
                    'centred': False},   # centred: 2p - 1 in place of the chance p
        'overlong': {'margin': 16},      # tokens before rollout.max_tokens in which it sets in
        'cosine': {'right': (2.0, 1.0), 'wrong': (-10.0, 0.0)},  # at length 0 and at the limit
    })

    config.collection.source = 'policy'  # of completions: policy, reference (a frozen sampler), ...
    config.collection.dead_groups = 'keep'  # dead groups: keep (advantage 0), drop (also from the weights) ...
    config.collection.max_draws = 10     # rollouts that resample may draw in a step
    config.collection.allocation = 'equal'  # completions of each prompt: equal, rollout.group_size ...
    config.collection.reference = 'frozen'  # frozen, hard (the policy, every reference_every steps) or polyak ...
    config.collection.reference_every = 0  # steps between two renewals of the reference; of hard and polyak
    config.reference.path = ''           # the first reference: a model's folder or hub name, a run's workdir ...
    config.teacher.path = ''             # folder or hub name of a model with the policy's tokenizer; '': none ...

    config.algorithm.advantage = 'group_norm'  # worth of a completion among others ...
    config.algorithm.ratio = 'token'     # the policy's probability over ratio_base's, by token or by row ...
    config.algorithm.surrogate = 'clip'  # the policy loss of a token, with its trust region ...
    config.algorithm.clip_low = 0.2      # a token with A < 0 has no gradient once its ratio is below 1 - clip_low
    config.algorithm.clip_high = 0.2     # a token with A > 0 has no gradient once its ratio is above 1 + clip_high
    config.algorithm.weights = 'sequence_mean'  # how the losses of tokens add up ...
    config.algorithm.fixed_length = 1024  # tokens that a row's sum is divided by
    config.algorithm.correction = 'none'  # factors of the surrogate, against logprobs of the sampler ...
    config.algorithm.selection = 'all_tokens'  # tokens on which the surrogate acts ...
    config.algorithm.kl = 'none'         # estimator of the KL to the reference ...
    config.algorithm.kl_coef = 0.0       # weight of kl, 0 where kl is none; above 0 a reference policy is kept
    config.algorithm.kl_placement = 'loss'  # where the KL counts: loss; reward_sequence, subtracted from ...
    config.algorithm.regularizers = ()   # further terms of the loss ...
    config.algorithm.entropy_coef = 0.0  # weight of regularizer entropy_bonus; below 0 it pays for a narrow ...

    config.learner.epochs = 1            # passes over a step's rollout
    config.learner.minibatches = 1       # optimizer updates a pass
    config.learner.microbatches = 1      # gradients that add up to one update, where rows are padded; above 1 ...
    config.learner.pack_columns = -1     # tokens of a packed row ...
    config.learner.remat = 'none'        # computed again in the backward pass: none; dots ...
    config.learner.offload = ()          # lie in the hosts' memory until they are used: optimizer, its moments ...
    config.optimizer.learning_rate = 1e-6  # of AdamW, after warm-up
    config.optimizer.schedule = 'constant'  # after warm-up: constant, linear or cosine to zero
    config.optimizer.warmup = 0          # updates at the start, over which the learning rate rises
    config.optimizer.warmup_ratio = 0.0  # the same as a share of all updates, where warmup is 0
    config.optimizer.weight_decay = 0.0  # of AdamW, on the parameters that the key decays names
    config.optimizer.max_grad_norm = 1.0  # norm to which longer gradients are scaled down
    config.critic_optimizer.learning_rate = 1e-5  # of AdamW, after warm-up
    config.supervised.updates = 0        # updates of the cold start; 0: none
    config.supervised.batch = 128        # demonstrations an update
    config.supervised.optimizer.learning_rate = 1e-3  # of AdamW, after warm-up

    config.evaluation.every = 0          # steps between evaluations; 0: before and after only
    config.evaluation.prompts = 256      # prompts of the test split
    config.evaluation.samples = 8        # completions of a prompt that are drawn: n of maj@n, the largest k of pass@k
    config.evaluation.temperature = 0.0  # of these completions; 0: rollout.temperature
    config.checkpoint.every = 50         # steps between checkpoints; the last step is always saved
    config.checkpoint.keep = 2           # checkpoints that are kept, the newest; older ones are deleted
    config.checkpoint.best = ''          # figure of the evaluations, like greedy: the checkpoint of its highest ...
    config.mesh.data = 0                 # devices that share the rows, each with all weights; 0: all devices that ...
    config.mesh.fsdp = 1                 # devices that share the rows, each with a part of the weights; 1: not cut
    config.mesh.context = 1              # devices that share the columns of a row; 1: not cut
    config.mesh.tensor = 1               # devices that share the heads and the width of the mlp; 1: not cut
    config.mesh.sampler = 0              # devices beside these on which the sampler has a mesh of its own ...
    config.mesh.transport = 'files'      # how weights reach a sampler whose devices belong to other ...
    config.diagnose.on = 'say'           # what a diagnosis does: say; save, which also writes a checkpoint; stop; off
    config.log.rollouts = 10             # steps between dumps of completions; 0: never; the last ...
    config.log.trackers = ()             # besides the files and TensorBoard: wandb, trackio
    config.log.hang_after = 0.0          # seconds that a step may take before the run ends with all stacks; 0: any

    _apply(config, preset)
    return settings.lock(config)  # a misspelt key in an experiment is an error


def _apply(config, preset):
    """Changes the config by a preset, whose function apply takes the sections to change: algorithm, collection."""
    apply = user_files.load_function('preset', f'{preset}:apply') if user_files.is_file(preset) else _find(preset)
    apply(**{name: config[name] for name in inspect.signature(apply).parameters})


def _find(preset):
    """The function apply of configs/algorithms/<preset>.py; raises BadInput for an unknown preset."""
    if preset.isidentifier():
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(f'grpo_jax.configs.algorithms.{preset}').apply
    names = os.listdir(os.path.join(os.path.dirname(__file__), 'algorithms'))
    choices = sorted(n[:-3] for n in names if n.endswith('.py') and n[0] != '_')
    near = difflib.get_close_matches(preset.lower().replace('-', '_'), choices, 1)
    hint = f'; did you mean {near[0]}?' if near else ''
    remedy = f'choose one of {", ".join(choices)}, or give FILE.py of yours{hint}'
    raise BadInput('preset', preset, f'no such file in configs/algorithms; {remedy}')
