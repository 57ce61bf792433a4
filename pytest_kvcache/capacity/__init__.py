"""What should fit: a model's layers, the bytes that its cache takes, and the blocks that an engine makes of them."""

from pytest_kvcache.capacity.planner import Plan, plan

__all__ = ["Plan", "plan"]
