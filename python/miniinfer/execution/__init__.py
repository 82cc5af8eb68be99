"""How steps are run: one after the other or overlapped, launched kernel by kernel or as graphs."""
