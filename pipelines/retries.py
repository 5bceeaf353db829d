"""How often and when a shard is tried again, and what is said of it; with Prefect and without."""


def delays_s(retries: int) -> list[float]:
    """Seconds before each retry: long enough in the end for a server that starts anew."""
    return [min(2.0**i, 60.0) for i in range(retries)]


def trying_again(name: str, error: object, attempt: object, retries: object) -> str:
    """What is said when a shard is tried again."""
    what, _, _ = str(error).partition("; ")  # the rest is what to do once it is tried no more
    return f"{name}: {what}; trying again ({attempt} of {retries})"
