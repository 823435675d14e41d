"""Settings that all backends with a tracker's own package have, declared. Must not know: one tracker's own."""

from __future__ import annotations

from verl_shipper.backends.sdk.parts import SETTLE_S_MAX
from verl_shipper.schema import Key, Kind


def ca_file_setting() -> Key:
    """The authority of a tracker, for every backend that speaks HTTP."""
    return Key(
        "ca_file",
        Kind.PATH,
        "a PEM file with the authority of this tracker's certificate, trusted beside those that the environment names",
        "a private authority is known to nobody else, and a service has none of your shell's variables",
        "/etc/ssl/corp-ca.pem",
        otherwise="see [proxies and certificates](#proxies-and-certificates)",
    )


def shared_settings(name: str, title: str, *, settle_s: float) -> tuple[Key, ...]:
    """Declarations for backend `name`, whose tracker people call `title`."""
    as_in = f"as in `{name}.init`"
    return (
        Key(
            "api_key_file",
            Kind.PATH,
            f"file with the key, of mode 0600; else `{name.upper()}_API_KEY`, netrc, …",
            "a key in a setting could be read by everybody on the machine",
            f"/etc/verl-shipper/{name}.key",
            otherwise="see [keys](#keys)",
        ),
        ca_file_setting(),
        Key("group", Kind.TEXT, as_in, "runs of one sweep stand together", "sweep-7", otherwise="none"),
        Key("job_type", Kind.TEXT, as_in, "tells training from evaluation", "train", otherwise="none"),
        Key("tags", Kind.TEXTS, as_in, "to find runs again", "[grpo, qwen2]", otherwise="none"),
        Key(
            "settle_s",
            Kind.NUMBER,
            "after a lost answer or a crash nothing is sent until the server's own count stood still for so long",
            "must be longer than that count lags, else rows come twice",
            "20",
            default=settle_s,
            unit="seconds",
            low=0.001,
            high=SETTLE_S_MAX,
        ),
        Key(
            "transport",
            Kind.CHOICE,
            f"through {title}'s own package",
            "leaves room for other ways",
            "sdk",
            default="sdk",
            choices=("sdk",),
        ),
        Key(
            "lock_dir",
            Kind.PATH,
            "keeps lanes apart where `/dev/shm` is not ours",
            "a run has one writer per machine",
            "/run/lock/verl-shipper",
            otherwise="`<state>/locks`",
        ),
        Key(
            "work_dir",
            Kind.PATH,
            f"where {title}'s processes work; emptied by them",
            "wants a local disk",
            f"/var/tmp/verl-shipper/{name}",  # noqa: S108 - an example
            otherwise=f"`<state>/sdk/{name}`",
        ),
    )
