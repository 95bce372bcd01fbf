"""Prints a software bill of materials of the packages that an environment has, as CycloneDX 1.6: each image has one.

``/opt/sapwood/bin/python sbom.py NAME VERSION > /opt/sapwood/sbom.cdx.json``
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from typing import Any

_HASH = re.compile(r"[0-9a-f]{64}")


def purl(name: str, version: str) -> str:
    """The package URL of a Python package."""
    return f"pkg:pypi/{re.sub(r'[-_.]+', '-', name).lower()}@{version.replace('+', '%2B')}"


def component(package: Distribution) -> dict[str, Any]:
    """A package, with its licence and, where it was installed from a file with a known hash, that."""
    name, version = package.metadata["Name"], package.version
    found: dict[str, Any] = {"type": "library", "bom-ref": purl(name, version), "name": name, "version": version}
    found["purl"] = purl(name, version)
    expression, text = package.metadata.get("License-Expression"), package.metadata.get("License")
    if expression:
        found["licenses"] = [{"expression": expression}]
    elif text and len(text) <= 100 and "\n" not in text:
        found["licenses"] = [{"license": {"name": text}}]
    origin = json.loads(package.read_text("direct_url.json") or "{}")
    digest = origin.get("archive_info", {}).get("hashes", {}).get("sha256", "")
    if _HASH.fullmatch(digest):
        found["hashes"] = [{"alg": "SHA-256", "content": digest}]
    return found


def requirements(package: Distribution, known: dict[str, str]) -> list[str]:
    """What it requires of the packages that are there, by their references."""
    names = (re.split(r"[\s;<>=!~\[(]", line, maxsplit=1)[0] for line in package.requires or ())
    wanted = {purl(name, "").removesuffix("@") for name in names}
    return sorted(known[each] for each in wanted if each in known)


def bill(image: str, version: str, packages: Iterable[Distribution]) -> dict[str, Any]:
    """The bill of an image. The same packages make the same bill: it has neither a time nor a serial number."""
    every = {purl(each.metadata["Name"], "").removesuffix("@"): each for each in packages}
    known = {name: purl(each.metadata["Name"], each.version) for name, each in every.items()}
    ordered = [every[name] for name in sorted(every)]
    top = f"{image}@{version}"
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {"type": "container", "bom-ref": top, "name": image, "version": version},
            "properties": [{"name": "python", "value": sys.version.split()[0]}],
        },
        "components": [component(each) for each in ordered],
        "dependencies": [
            {"ref": top, "dependsOn": sorted(known.values())},
            *({"ref": known[name], "dependsOn": requirements(every[name], known)} for name in sorted(every)),
        ],
    }


if __name__ == "__main__":
    print(json.dumps(bill(sys.argv[1], sys.argv[2], distributions()), indent=1))
