"""The tool of the tool agent: `actor_rollout_ref.rollout.multi_turn.function_tool_path` names this file."""

import ast

from verl.tools.function_tool import function_tool


def calculator(expression: str) -> str:
    """Multiplies two whole numbers.

    Args:
        expression: The product to compute, such as 6*7.
    """
    node = ast.parse(expression, mode="eval").body
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return "only products, please"
    return str(ast.literal_eval(node.left) * ast.literal_eval(node.right))


function_tool(calculator)
