"""Data that the simulator ships; `README.md` beside it says where each file comes from."""
