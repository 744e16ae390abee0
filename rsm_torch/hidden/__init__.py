"""Hidden states of causal language models: capturing them, and a memory made of them."""
