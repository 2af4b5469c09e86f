"""What transformers + torch compute with SmolLM2-135M-Instruct in float32, for tests/models/test_golden.py.

`python tests/golden/make_smollm2.py FOLDER` writes smollm2.npz beside this file: text, ids i32[T], logits f32[T, 64]
of every 768th token, targets f32[T - 1] (logits of the next ids), normalizers f32[T] (log of the summed exponentials of
logits), greedy i32[16] after the first 12 ids.
"""

import os
import sys

import numpy as np

TEXT = (
    'The cat sat on the warm stone. It was a quiet morning in May. A child came by with a red ball, and the cat '
    'looked up. They played until noon. Then both of them fell asleep in the grass.'
)
STRIDE, PROMPT, GREEDY = 768, 12, 16


def main(folder):
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = transformers.AutoTokenizer.from_pretrained(folder).encode(TEXT)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
        options = dict(max_new_tokens=GREEDY, min_new_tokens=GREEDY, do_sample=False)
        greedy = model.generate(torch.tensor([ids[:PROMPT]]), **options)[0, PROMPT:]
    np.savez_compressed(
        os.path.join(os.path.dirname(os.path.abspath(__file__)), 'smollm2.npz'),
        text=TEXT,
        ids=np.array(ids, np.int32),
        logits=logits[:, ::STRIDE].numpy(),
        normalizers=torch.logsumexp(logits, -1).numpy(),
        targets=logits[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0].numpy(),
        greedy=greedy.numpy().astype(np.int32),
    )


if __name__ == '__main__':
    main(sys.argv[1])
