"""What holds in a set of objects of Kubernetes that no schema says: that they refer to one another as they should."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  # RFC 1035: a Service asks for more than the others
_PLANS = "/etc/slipway/plans/"
_ROUTER = "/etc/slipway/router"
_RANDOM = "-xxxxx"


def read_directory(directory: Path) -> tuple[list[Object], dict[str, dict[str, str]]]:
    """What ``kubectl kustomize`` makes of a directory that we wrote: its objects, and the data of its ConfigMaps."""
    kustomization = yaml.safe_load((directory / "kustomization.yaml").read_text())
    objects = [yaml.safe_load((directory / name).read_text()) for name in kustomization["resources"]]
    maps = {
        entry["name"]: {Path(name).name: (directory / name).read_text() for name in entry["files"]}
        for entry in kustomization["configMapGenerator"]
    }
    return objects, maps


def job_templates(found: Object) -> Iterator[tuple[str, Object]]:
    """Jobs that an object is or makes, each with the name it will have."""
    name = found["metadata"]["name"]
    if found["kind"] == "Job":
        yield name, found
    elif found["kind"] == "JobSet":
        for entry in found["spec"]["replicatedJobs"]:
            yield f"{name}-{entry['name']}-0", {"apiVersion": "batch/v1", "kind": "Job", **entry["template"]}


def pod_templates(found: Object) -> Iterator[tuple[str, Object]]:
    """Templates of pods, each with the longest name that a pod of it will have."""
    name = found["metadata"]["name"]
    if found["kind"] == "LeaderWorkerSet":
        group = found["spec"]["leaderWorkerTemplate"]
        yield f"{name}-0", group["leaderTemplate"]
        yield f"{name}-0-{group['size'] - 1}", group["workerTemplate"]
    elif found["kind"] == "Deployment":
        yield f"{name}-0123456789{_RANDOM}", found["spec"]["template"]
    for job, template in job_templates(found):
        yield f"{job}-0{_RANDOM}", template["spec"]["template"]


def check_objects(objects: list[Object], maps: Mapping[str, Mapping[str, str]]) -> None:
    """Assert all of it."""
    named = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(set(named)) == len(named)
    for kind, name in named:
        assert _NAME.fullmatch(name) and len(name) <= 63, (kind, name)
    # A LeaderWorkerSet makes a Service of its own name, and so does a JobSet that gives its pods host names.
    made = [name for kind, name in named if kind in ("LeaderWorkerSet", "Service")]
    assert len(set(made)) == len(made)
    for each in objects:
        if each["kind"] == "JobSet":
            _check_order(each)
        for pod, template in pod_templates(each):
            assert len(pod) <= 63, pod
            _check_lifetime(each["kind"], template["spec"])
            _check_volumes(template["spec"], maps)
            _check_containers(template["spec"])
        _check_directories(each)
    _check_selectors(objects)
    headless = [each for each in objects if each["spec"].get("clusterIP") == "None"]
    named = {(port["name"], each["metadata"]["name"]) for each in headless for port in each["spec"]["ports"]}
    configurations = [text for files in maps.values() for file, text in files.items() if file.endswith(".cfg")]
    asked = {found for text in configurations for found in re.findall(r'"_(\w+)\._tcp\.([-a-z0-9]+)\.\$', text)}
    assert asked <= named and bool(asked) is bool(headless), "a router finds its servers by the ports of a Service"


def _check_directories(found: Object) -> None:
    """Assert that each of several servers has a directory of its own, and that a new one is ready before another ends.

    Two servers in one directory would find it locked.
    """
    if found["kind"] not in ("Deployment", "LeaderWorkerSet"):
        return
    spec, is_several = found["spec"], found["spec"]["replicas"] > 1
    containers = [template["spec"]["containers"][0] for _, template in pod_templates(found)]
    for each in containers:
        assert any("subPathExpr" in mount for mount in each["volumeMounts"]) is is_several
        assert not is_several or not any(word.startswith("--stages-file=") for word in each["command"])
    rolling = spec.get("strategy", {}).get("rollingUpdate") or spec.get("rolloutStrategy", {}).get(
        "rollingUpdateConfiguration"
    )
    assert rolling == (
        {"maxUnavailable": 0, "maxSurge": 1} if is_several or containers[0]["name"] == "router" else None
    )


def _check_order(found: Object) -> None:
    assert found["spec"]["network"] == {"enableDNSHostnames": False}
    before: list[str] = []
    for entry in found["spec"]["replicatedJobs"]:
        assert entry["name"] not in before
        assert [each["name"] for each in entry.get("dependsOn", ())] == before[-1:], "each after the one before"
        assert all(each["status"] == "Complete" for each in entry.get("dependsOn", ())), "and after its success"
        before.append(entry["name"])


def _check_lifetime(kind: str, spec: Object) -> None:
    ends = kind in ("Job", "JobSet")
    assert (spec.get("restartPolicy", "Always") == "Never") is ends, (
        "podFailurePolicy asks for Never, a server for Always"
    )
    assert ends or "activeDeadlineSeconds" not in spec, "the apiserver refuses it in what stays"
    assert spec["terminationGracePeriodSeconds"] > 10  # a command has so long


def _check_volumes(spec: Object, maps: Mapping[str, Mapping[str, str]]) -> None:
    volumes = {each["name"]: each for each in spec["volumes"]}
    assert len(volumes) == len(spec["volumes"])
    mounted = set()
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        mounts = container["volumeMounts"]
        assert len({each["mountPath"] for each in mounts}) == len(mounts)
        mounted |= {each["name"] for each in mounts}
        where = {each["mountPath"]: volumes[each["name"]] for each in mounts}
        told = {each["name"] for each in container.get("env", ())}
        for own in (each["subPathExpr"] for each in mounts if "subPathExpr" in each):
            assert not own.startswith("/") and ".." not in own.split("/"), own
            assert re.findall(r"\$\((\w+)\)", own) and set(re.findall(r"\$\((\w+)\)", own)) <= told, own
        if container["name"] == "router":
            file = maps[where[_ROUTER]["configMap"]["name"]][container["command"][-1].removeprefix(f"{_ROUTER}/")]
            _check_router(container, file)
            continue
        plans = maps[where[_PLANS.rstrip("/")]["configMap"]["name"]]
        words = [word for word in container["command"] if word.endswith(".plan.json")]
        assert words and {word.removeprefix(_PLANS) for word in words} <= plans.keys()
    assert mounted == volumes.keys()


def _check_router(container: Object, text: str) -> None:
    """Assert that it listens where its container has ports, and that its variables are those that it replaces."""
    binds = {int(port) for port in re.findall(r'^    bind "\$\{POD_IP\}:(\d+)"', text, re.MULTILINE)}
    assert binds == {each["containerPort"] for each in container["ports"]}
    assert set(re.findall(r"\$\{(\w+)\}", text)) == {each["name"] for each in container["env"]}
    assert f"monitor-uri {container['readinessProbe']['httpGet']['path']}\n" in text


def _check_containers(spec: Object) -> None:
    (container,) = spec["containers"]
    ports = container.get("ports", ())
    names = {each["name"] for each in ports}
    assert len(names) == len({each["containerPort"] for each in ports}) == len(ports)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert (probe in container) is bool(ports)
        assert not ports or container[probe]["httpGet"]["port"] in names
    assert not any("value" in each for each in container["env"]), "by reference only"
    requests, limits = container["resources"]["requests"], container["resources"]["limits"]
    assert {name: size for name, size in requests.items() if name != "cpu"} == limits, "devices are not overcommitted"


def _check_selectors(objects: list[Object]) -> None:
    templates = [(each["kind"], template) for each in objects for _, template in pod_templates(each)]
    for each in objects:
        spec = each["spec"]
        if each["kind"] == "Deployment":
            wanted = spec["selector"]["matchLabels"].items()
            assert wanted <= spec["template"]["metadata"]["labels"].items()
            assert _chosen(templates, spec["selector"]["matchLabels"]) == [spec["template"]], "and no pods of stages"
        elif each["kind"] == "Service":
            (template,) = _chosen(templates, spec["selector"])
            assert [port["targetPort"] for port in spec["ports"]] == [port["name"] for port in _ports(template)]
            assert [port["port"] for port in spec["ports"]] == [port["containerPort"] for port in _ports(template)]
        elif each["kind"] == "PodMonitor":
            (template,) = _chosen(templates, spec["selector"]["matchLabels"])
            assert {end["port"] for end in spec["podMetricsEndpoints"]} <= {port["name"] for port in _ports(template)}


def _ports(template: Object) -> list[Object]:
    ports: list[Object] = template["spec"]["containers"][0]["ports"]
    return ports


def _chosen(templates: list[tuple[str, Object]], selector: Mapping[str, str]) -> list[Object]:
    """Templates whose pods have these labels; a LeaderWorkerSet labels its pods by their index."""
    found = []
    for kind, template in templates:
        is_leader = (
            "leaderTemplate" if kind == "LeaderWorkerSet" and "ports" in template["spec"]["containers"][0] else ""
        )
        index = {"leaderworkerset.sigs.k8s.io/worker-index": "0" if is_leader else "1"}
        labels = {**template["metadata"]["labels"], **(index if kind == "LeaderWorkerSet" else {})}
        if selector.items() <= labels.items():
            found.append(template)
    return found
