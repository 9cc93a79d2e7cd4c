"""Reinforcement learning from rewards. Users' files import `environment` from here, in processes
without torch, so this file imports nothing."""
