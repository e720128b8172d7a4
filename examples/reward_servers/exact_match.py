"""The smallest reward server: the response must be the answer. Run `python exact_match.py`."""

from typing import Any

from headrace.clients.reward import serve


def score(prompt: str, response: str, data: dict[str, Any]) -> bool:
    return response.strip() == data["answer"]


if __name__ == "__main__":
    serve(score, "127.0.0.1:50051")
