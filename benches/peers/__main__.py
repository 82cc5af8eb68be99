"""`python -m benches.peers`: the comparison alone, printed."""

from . import compare

if __name__ == "__main__":
    for name, value in sorted(compare.run().items()):
        print(f"{name:32} {value:10.3f}")
