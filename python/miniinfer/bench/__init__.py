"""Measuring the control plane without a model: `miniinfer bench core`."""
