"""Whether objects are what Kubernetes takes, by the schemas of its versions, and custom resources by those in schemas/."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import kubernetes_validate
from chart_render import Object

_SCHEMAS = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
VERSIONS = tuple(
    sorted((folder.name[1:-13] for folder in _SCHEMAS.glob("v*-local-strict")), key=lambda name: [int(part) for part in name.split(".")])
)
OLDEST, NEWEST = VERSIONS[0], VERSIONS[-1]

# What the schemas call the file beside them, as a URI without a host of its own.
_DEFINITIONS = "json-schema:///api/_definitions.json"


def faults(object: Object, version: str) -> Iterator[str]:
    """What one version of Kubernetes would not take, fields that it does not know included."""
    name = f"{object['kind']}/{object['metadata']['name']}"
    for error in _validator(version, object["apiVersion"], object["kind"]).iter_errors(object):
        yield f"{version}: {name}: {'.'.join(map(str, error.instance_path))}: {error.message[:300]}"


@functools.cache
def _registry(version: str) -> jsonschema_rs.Registry:
    definitions = json.loads((_SCHEMAS / f"v{version}-local-strict" / "_definitions.json").read_text())
    return jsonschema_rs.Registry([(_DEFINITIONS, definitions)], draft=jsonschema_rs.Draft202012)


@functools.cache
def _validator(version: str, api_version: str, kind: str) -> jsonschema_rs.Draft202012Validator:
    schema = _custom().get((api_version, kind))
    if schema is None:
        # As kubernetes-validate names its files: apps/v1 Deployment is deployment-apps-v1.
        group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
        schema = json.loads((_SCHEMAS / f"v{version}-local-strict" / f"{kind.lower()}-{group}.json").read_text())
    return jsonschema_rs.Draft202012Validator(schema, registry=_registry(version))


@functools.cache
def _custom() -> dict[tuple[str, str], Any]:
    found = {}
    for file in sorted((Path(__file__).parent / "schemas").glob("*.json")):
        contents = json.loads(file.read_text())
        for kind, reference in contents["kinds"].items():
            found[contents["apiVersion"], kind] = {**reference, "$defs": contents["$defs"]}
    return found


def is_custom(object: Object) -> bool:
    return (object["apiVersion"], object["kind"]) in _custom()
