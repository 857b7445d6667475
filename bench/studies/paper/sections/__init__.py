"""The parts of the report, in their order. Each says what it wants to have simulated, and writes itself."""
