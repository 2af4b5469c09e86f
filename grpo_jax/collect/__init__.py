"""What a step learns from: completions of its prompts, their rewards, and the logprobs of other policies."""
