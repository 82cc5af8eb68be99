"""Other engines on the same model, prompts and machine, in turns with this one."""
