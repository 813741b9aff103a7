"""`kvpool cluster URL`: lists the members of a cluster, their roles and their load."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from typing import Any, Final

from kvpool.cluster import Cluster, Member
from kvpool.errors import ArgumentError

__all__ = ["add_parser", "add_url", "join"]

_COLUMNS: Final = (
    *("member", "instance", "role", "state", "HBM free/active/cached", "of", "DRAM free/active/cached", "of"),
    *("requests", "seen for", "endpoints"),
)


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser("cluster", help="list the members of a cluster, their blocks and their load")
    add_url(parser, optional=True)
    parser.add_argument(
        "--forget", metavar="NAME",
        help="remove the folder of a local cluster without members, with its secret and its counter of ids",
    )  # fmt: skip
    parser.add_argument(
        "--repair-ids", action="store_true",
        help="write the counter of ids in etcd again, above every id that etcd lists, if no live member can do so",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def add_url(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Adds the arguments for the URL and the credentials of a cluster."""
    where = "local://NAME or etcd://HOST:PORT/PREFIX (etcds:// over TLS)"
    parser.add_argument("url", metavar="URL", help=where, nargs="?" if optional else None)
    parser.add_argument(
        "--timeout", type=float, default=10.0, metavar="SECONDS", help="how long to wait for the directory"
    )
    parser.add_argument("--tls-ca", metavar="FILE", help="CA certificates for etcd's certificate")
    parser.add_argument("--tls-cert", metavar="FILE", help="client certificate")
    parser.add_argument("--tls-key", metavar="FILE", help="its key")
    parser.add_argument("--user", metavar="NAME", help="user name for etcd; set the password in KVPOOL_ETCD_PASSWORD")


def join(arguments: argparse.Namespace) -> Cluster:
    """Joins the cluster that the arguments name, as an observer.

    Raises:
        ArgumentError, DeadlineExceeded, AuthError, StateError: As Cluster.join.
    """
    options = {
        "timeout": arguments.timeout,
        "tls_ca": arguments.tls_ca,
        "tls_cert": arguments.tls_cert,
        "tls_key": arguments.tls_key,
        "user": arguments.user,
        "password": os.environ.get("KVPOOL_ETCD_PASSWORD") if arguments.user else None,
    }
    return Cluster.join(arguments.url, **options)


def _row(member: Member) -> tuple[str, ...]:
    """The texts of a member, one for each of `_COLUMNS`."""
    load = member.load
    return (
        member.name,
        str(member.instance),
        member.role,
        member.state,
        f"{load.hbm_free}/{load.hbm_active}/{load.hbm_historical}",
        str(member.hbm_blocks),
        f"{load.dram_free}/{load.dram_active}/{load.dram_historical}",
        str(member.dram_blocks),
        str(load.requests),
        f"{member.joined_for_s:.0f} s",
        " ".join(member.endpoints),
    )


def _run(arguments: argparse.Namespace) -> None:
    if arguments.forget is not None:
        if arguments.url is not None:
            raise ArgumentError(f"--forget {arguments.forget} takes no other cluster: {arguments.url}")
        name = arguments.forget.removeprefix("local://")
        existed = Cluster.forget(f"local://{name}", timeout=arguments.timeout)
        print(f"{name} is removed" if existed else f"there was no local cluster {name}")
        return
    if arguments.url is None:
        raise ArgumentError("name a cluster: local://NAME or etcd://HOST:PORT/PREFIX")
    with join(arguments) as cluster:
        if arguments.repair_ids:
            print(f"the counter of ids is at {cluster.repair_ids()}")
            return
        members = cluster.members()
    print(json.dumps([_facts(one) for one in members], indent=2) if arguments.json else _text(members))


def _facts(member: Member) -> dict[str, Any]:
    facts = {field.name: getattr(member, field.name) for field in dataclasses.fields(member) if field.compare}
    return facts | {"load": dataclasses.asdict(member.load), "seen_for_s": round(member.joined_for_s, 3)}


def _text(members: list[Member]) -> str:
    if not members:
        return "no members"
    rows = [_COLUMNS, *map(_row, members)]
    widths = [max(len(one[column]) for one in rows) for column in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(one, widths, strict=True)).rstrip() for one in rows
    )
