"""Run by the crash test: adds items one by one and says so after each."""

import sys

from text_support import Hashed

from rsm_torch.text.memory import AgentMemory

path, count = sys.argv[1], int(sys.argv[2])
memory = AgentMemory(Hashed(), path=path)
for number in range(count):
    [id] = memory.add(f"text {number}", f"s{number % 7}")
    print(id, flush=True)
memory.close()
