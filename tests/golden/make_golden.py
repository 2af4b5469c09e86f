"""Tiny random models of each family, made by transformers + torch, and their logits.

`python tests/golden/make_golden.py` writes one npz a family beside this file: config (the text of config.json),
weights/<tensor name> as float16, tokens i32[2, 16], mask bool[2, 16] with one row left-padded, logits f32[2, 16, V].
"""

import os
import tempfile

import numpy as np

SIZES = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    initializer_range=0.2,
)
# together: tied and not, each kind of bias, plain and scaled rotary positions, a head_dim that width does not give
FAMILIES = {
    'llama': dict(
        tie_word_embeddings=False,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters=dict(
            rope_type='llama3',
            rope_theta=1e4,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    'qwen2': dict(
        tie_word_embeddings=True,
        rms_norm_eps=1e-3,
        rope_parameters=dict(rope_type='yarn', rope_theta=1e4, factor=4.0, original_max_position_embeddings=16),
    ),
    'qwen3': dict(tie_word_embeddings=True, head_dim=12, rope_parameters=dict(rope_type='default', rope_theta=1e6)),
}
# Smaller ones. Windows are shorter than the rows; caps are so low that scores reach them; multipliers are none of 1.
SMALL = dict(vocab_size=32, hidden_size=16, intermediate_size=20, head_dim=8)
BY_TYPE = dict(sliding_window=5, layer_types=['sliding_attention', 'full_attention'])
GEMMA = dict(query_pre_attn_scalar=5, tie_word_embeddings=True, **BY_TYPE)
FAMILIES |= {
    'mistral': dict(SMALL, sliding_window=6, tie_word_embeddings=False),
    'granite': dict(
        SMALL,
        attention_bias=True,
        mlp_bias=True,
        embedding_multiplier=3.0,
        residual_multiplier=0.7,
        attention_multiplier=0.5,
        logits_scaling=0.4,
        tie_word_embeddings=True,
    ),
    'phi3': dict(
        SMALL,
        num_attention_heads=2,
        sliding_window=7,
        max_position_embeddings=64,
        original_max_position_embeddings=32,
        pad_token_id=0,
        rope_parameters=dict(
            rope_type='longrope',
            rope_theta=1e4,
            partial_rotary_factor=0.75,
            short_factor=[1.0, 1.3, 2.5],
            long_factor=[4.0, 5.0, 6.0],
        ),
    ),
    'smollm3': dict(
        SMALL,
        attention_bias=True,
        mlp_bias=True,
        no_rope_layers=[0, 1],
        use_sliding_window=True,
        sliding_window=4,
        pad_token_id=0,
        rope_parameters=dict(rope_type='default', rope_theta=1e3),
    ),
    'olmo2': dict(SMALL, attention_bias=True, tie_word_embeddings=False),
    'olmo3': dict(
        SMALL,
        **BY_TYPE,
        rope_parameters=dict(
            full_attention=dict(
                rope_type='yarn', rope_theta=1e4, factor=4.0, original_max_position_embeddings=16, attention_factor=1.2
            ),
            sliding_attention=dict(rope_type='default', rope_theta=1e4),
        ),
    ),
    'gemma2': dict(SMALL, **GEMMA, attention_bias=True, attn_logit_softcapping=1.5, final_logit_softcapping=2.0),
    'gemma3_text': dict(
        SMALL,
        **GEMMA,
        final_logit_softcapping=4.0,
        rope_parameters=dict(
            full_attention=dict(rope_type='linear', rope_theta=1e5, factor=8.0),
            sliding_attention=dict(rope_type='default', rope_theta=1e3),
        ),
    ),
}


def make(family, settings):
    """A float32 torch model with every weight random: norms and biases too, since at 1 and 0 they hide mistakes."""
    import torch  # only to make models: the tests read the npz without it
    import transformers

    config = transformers.AutoConfig.for_model(family, **(SIZES | settings))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # norms begin at 1, but at 0 where 1 is added to them
            offset = float(weight[0]) if 'norm' in name else 0.0
            scale = 0.3 if weight.ndim == 1 else weight.shape[1] ** -0.5
            drawn = offset + scale * torch.randn(weight.shape, generator=noise)
            weight.copy_(drawn.half())  # float16 in the file then loses nothing
    return model


def batch(vocab_size=SIZES['vocab_size']):
    """(tokens i32[2, 16], mask bool[2, 16]): a full row, and one with five columns of padding on the left."""
    tokens = np.random.default_rng(0).integers(0, vocab_size, (2, 16)).astype(np.int32)
    mask = np.ones((2, 16), bool)
    mask[1, :5] = False
    return tokens, mask


def logits(model, tokens, mask):
    """Logits f32[B, T, V] of the torch model; those at padding mean nothing."""
    import torch

    positions = np.maximum(np.cumsum(mask, -1) - 1, 0)
    with torch.no_grad():
        return (
            model(
                torch.tensor(tokens).long(),
                attention_mask=torch.tensor(mask).long(),
                position_ids=torch.tensor(positions),
            )
            .logits.float()
            .numpy()
        )


def main():
    """Writes the files."""
    for family, settings in FAMILIES.items():
        model = make(family, settings)
        with tempfile.TemporaryDirectory() as folder:
            model.config.architectures = [type(model).__name__]
            model.config.save_pretrained(folder)
            with open(os.path.join(folder, 'config.json'), encoding='utf8') as file:
                config = file.read()
        tokens, mask = batch(model.config.vocab_size)
        # state_dict lists a tied head twice; a folder holds it once
        weights = {
            f'weights/{name}': weight.detach().numpy().astype(np.float16) for name, weight in model.named_parameters()
        }
        path = os.path.join(os.path.dirname(os.path.abspath(__file__)), f'{family}.npz')
        np.savez_compressed(
            path, config=config, tokens=tokens, mask=mask, logits=logits(model, tokens, mask), **weights
        )
        print(path, os.path.getsize(path))


if __name__ == '__main__':
    main()
