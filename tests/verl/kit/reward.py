"""The reward; `reward.custom_reward_function.path` names this file. All that it returns is verl's reward_extra_info."""

import re
from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **_: Any
) -> dict[str, Any]:
    del data_source, extra_info
    answer = re.search(r"The answer is (-?\d+)\.", solution_str)
    right = answer is not None and answer[1] == ground_truth
    return {"score": float(right), "acc": float(right), "format": "ok" if answer else "no answer"}
