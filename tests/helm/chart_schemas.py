"""Whether objects are what Kubernetes takes, by the schemas of its versions, and custom resources by those in schemas/.

JSON schemas cannot say that the elements of a list are told apart by some of their fields (`x-kubernetes-list-map-keys`). The API server
refuses a custom resource where two elements of such a list have the same, and merges or refuses them in objects of its own.
"""

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
# What the chart renders for newer ones only: by kind, or by a field.
_SINCE = {"'resourceClaims'": "1.32.", "'ValidatingAdmissionPolicy": "1.30."}

# The schemas' name for the file beside them, as a URI without a host of its own.
_DEFINITIONS = "json-schema:///api/_definitions.json"


def faults(object: Object, version: str) -> Iterator[str]:
    """Yields what one version of Kubernetes would not take, unknown fields included; the first one for what is newer."""
    for mark, since in _SINCE.items():
        first = next(number for number, each in enumerate(VERSIONS) if each.startswith(since))
        if mark in str(object):
            version = VERSIONS[max(first, VERSIONS.index(version))]
    name = f"{object['kind']}/{object['metadata']['name']}"
    for error in _validator(version, object["apiVersion"], object["kind"]).iter_errors(object):
        yield f"{version}: {name}: {'.'.join(map(str, error.instance_path))}: {error.message[:300]}"
    schema = _schema(version, object["apiVersion"], object["kind"])
    for fault in _twice(object, schema, {**_definitions(version)["$defs"], **schema.get("$defs", {})}, ""):
        yield f"{version}: {name}: {fault}"


# Steps to a field: names, and for the element of a list what its keys are.
FieldPath = tuple[Any, ...]


def leaves(object: Object, version: str = NEWEST) -> dict[FieldPath, Any]:
    """Returns the values that managers of a server-side apply own one by one. A list without keys is one of them."""
    schema = _schema(version, object["apiVersion"], object["kind"])
    found: dict[FieldPath, Any] = {}
    _leaves(object, schema, {**_definitions(version)["$defs"], **schema.get("$defs", {})}, (), found)
    return found


def _leaves(value: Any, schema: Object, definitions: Object, path: FieldPath, found: dict[FieldPath, Any]) -> None:
    schema = _resolved(schema, definitions)
    keys = next(_keys(schema), ())
    if isinstance(value, dict) and value:
        for name, child in value.items():
            below = schema.get("properties", {}).get(name) or schema.get("additionalProperties")
            _leaves(child, below if isinstance(below, dict) else {}, definitions, (*path, name), found)
    elif isinstance(value, list) and keys:
        for each in value:
            _leaves(each, schema.get("items", {}), definitions, (*path, tuple(each.get(key) for key in keys)), found)
    else:
        found[path] = value


def _resolved(schema: Object, definitions: Object) -> Object:
    while "$ref" in schema:
        schema = definitions[schema["$ref"].partition("#/$defs/")[2]]
    return schema


def _twice(value: Any, schema: Object, definitions: Object, path: str) -> Iterator[str]:
    """Elements of lists that are there twice. `definitions`: what references in the schema are to."""
    schema = _resolved(schema, definitions)
    if isinstance(value, dict):
        others = schema.get("additionalProperties")
        for key, child in value.items():
            of_child = schema.get("properties", {}).get(key, others)
            if isinstance(of_child, dict):
                yield from _twice(child, of_child, definitions, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list):
        for keys in _keys(schema):
            # Kubernetes' own default, the only one among keys.
            found = [tuple(each.get(key, "TCP" if key == "protocol" else None) for key in keys) for each in value]
            named = [each for each in found if each != (None,) * len(keys)]
            for each in sorted({str(each) for each in named if named.count(each) > 1}):
                yield f"{path} has {each} twice, by {', '.join(keys)}"
        if schema.get("x-kubernetes-list-type") == "set" and any(value.count(each) > 1 for each in value):
            yield f"{path} has an element twice"
        if isinstance(schema.get("items"), dict):
            for number, each in enumerate(value):
                yield from _twice(each, schema["items"], definitions, f"{path}.{number}")


def _keys(schema: Object) -> Iterator[tuple[str, ...]]:
    """Sets of fields, by each of which the elements of a list must differ. Older versions of Kubernetes say of some lists only by what
    patches merge them. Ports have a name besides: of containers and Services it must be unique, too."""
    keys = schema.get("x-kubernetes-list-map-keys") or [schema[key] for key in ("x-kubernetes-patch-merge-key",) if key in schema]
    if keys:
        yield tuple(keys)
    if "protocol" in keys:
        yield ("name",)


@functools.cache
def _definitions(version: str) -> Object:
    """The file of Kubernetes' types: `$defs` by name."""
    found: Object = json.loads((_SCHEMAS / f"v{version}-local-strict" / "_definitions.json").read_text())
    return found


@functools.cache
def _registry(version: str) -> jsonschema_rs.Registry:
    return jsonschema_rs.Registry([(_DEFINITIONS, _definitions(version))], draft=jsonschema_rs.Draft202012)


@functools.cache
def _schema(version: str, api_version: str, kind: str) -> Object:
    schema = _custom().get((api_version, kind))
    if schema is None:
        # As kubernetes-validate names its files: apps/v1 Deployment is deployment-apps-v1.
        group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
        schema = json.loads((_SCHEMAS / f"v{version}-local-strict" / f"{kind.lower()}-{group}.json").read_text())
    found: Object = schema
    return found


@functools.cache
def _validator(version: str, api_version: str, kind: str) -> jsonschema_rs.Draft202012Validator:
    return jsonschema_rs.Draft202012Validator(_schema(version, api_version, kind), registry=_registry(version))


@functools.cache
def _custom() -> dict[tuple[str, str], Any]:
    found = {}
    for file in sorted((Path(__file__).parent / "schemas").glob("*.json")):
        contents = json.loads(file.read_text())
        for kind, reference in contents["kinds"].items():
            found[contents["apiVersion"], kind] = {**reference, "$defs": contents["$defs"]}
    return found
