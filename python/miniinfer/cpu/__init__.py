"""The forward pass on a CPU, over the kernels in Rust."""
