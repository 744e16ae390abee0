"""Other libraries' interfaces on an `AgentMemory`: each module asks for its library, and only for that one."""
