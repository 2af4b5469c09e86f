"""Adapters that the library peft has saved, and the logits with them.

`python tests/golden/make_peft.py`, where peft is installed, writes the folder peft beside this file: what peft saves of
random adapters on the model of qwen2.npz, and logits.npz with tokens, mask and logits as in that file.
"""

import json
import os

import numpy as np

from tests.golden import make_golden

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'peft')
SETTINGS = dict(r=3, lora_alpha=5, target_modules=['q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'down_proj'])


def base_model():
    """The torch model of qwen2.npz."""
    import torch
    import transformers

    with np.load(os.path.join(os.path.dirname(FOLDER), 'qwen2.npz')) as golden:
        settings = json.loads(str(golden['config']))
        weights = {name[8:]: torch.tensor(golden[name]).float() for name in golden.files if name.startswith('weights/')}
    config = transformers.AutoConfig.for_model(settings.pop('model_type'), **settings)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {'lm_head.weight'}, (missing, unexpected)
    return model


def adapted(model, **settings):
    """The model with adapters of both factors random."""
    import peft
    import torch

    config = peft.LoraConfig(task_type='CAUSAL_LM', lora_dropout=0.1, **settings)
    model, noise = peft.get_peft_model(model, config), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if 'lora_' in name:
                weight.copy_((0.3 * torch.randn(weight.shape, generator=noise)).half())
    return model.eval()


def main():
    """Writes the folder."""
    model = adapted(base_model(), **SETTINGS)
    model.save_pretrained(FOLDER)
    os.remove(os.path.join(FOLDER, 'README.md'))
    tokens, mask = make_golden.batch()
    logits = make_golden.logits(model, tokens, mask)
    np.savez_compressed(os.path.join(FOLDER, 'logits.npz'), tokens=tokens, mask=mask, logits=logits)


if __name__ == '__main__':
    main()
