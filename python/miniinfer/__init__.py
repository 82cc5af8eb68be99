"""Serve and embed large language models: a Rust control plane under a torch forward pass."""
