"""The dashboard, the rules and the documentation name only metrics, labels and values that there are."""

import importlib
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import promql_parser
import pytest
import yaml
from prometheus_client.metrics import MetricWrapperBase

from streamrag.serve.config.layers import load
from streamrag.serve.observe.metrics import Metrics
from streamrag.serve.observe.observer import Interface, Phase, QueryOutcome, Refusal

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = json.loads((ROOT / "deploy/grafana/streamrag.json").read_text())
RULES = [
    rule
    for group in yaml.safe_load((ROOT / "deploy/prometheus/streamrag.rules.yml").read_text())["groups"]
    for rule in group["rules"]
]
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
OF_TARGETS = {"instance", "job", "le"}
VALUES: Mapping[str, frozenset[str]] = {
    "interface": frozenset(get_args(Interface)),
    "outcome": frozenset(get_args(QueryOutcome)),
    "reason": frozenset(get_args(Refusal)),
    "phase": frozenset(get_args(Phase)),
}


def metrics() -> list[MetricWrapperBase]:
    made = vars(Metrics(with_default_registry=False))
    found = [value for each in made.values() for value in (each.values() if isinstance(each, dict) else [each])]
    return [value for value in found if isinstance(value, MetricWrapperBase)]


LABELS = {
    f"{metric._name}{suffix}": set(metric._labelnames) | OF_TARGETS
    for metric in metrics()
    for suffix in SUFFIXES[metric._type]
}


def parts(node: Any) -> Iterator[Any]:
    """The node and all below it."""
    yield node
    for name in ("lhs", "rhs", "expr", "vector_selector", "param"):
        below = getattr(node, name, None)
        if below is not None and type(below).__module__ == type(node).__module__:
            yield from parts(below)
    for below in getattr(node, "args", None) or ():
        yield from parts(below)


def selectors(expression: str) -> list[Any]:
    for name, value in (("$__rate_interval", "5m"), ("$instance", "all")):
        expression = expression.replace(name, value)
    found = [part for part in parts(promql_parser.parse(expression)) if type(part).__name__ == "VectorSelector"]
    assert found, expression
    return found


def metrics_of_vllm() -> set[str]:
    """Those that it registers, by its source: importing it takes seconds."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    source = (Path(spec.origin).parent / "v1/metrics/loggers.py").read_text()
    names = re.findall(r'"(vllm:\w+)"', source)
    return {f"{name}{suffix}" for name in names for suffix in ("", "_total", "_bucket", "_sum", "_count")}


def panels() -> list[Mapping[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


EXPRESSIONS = [
    *(pytest.param(t["expr"], id=f"{panel['title']}-{t['refId']}") for panel in panels() for t in panel["targets"]),
    *(pytest.param(rule["expr"], id=rule.get("record") or rule["alert"]) for rule in RULES),
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_names_only_what_there_is(expression: str) -> None:
    for selector in selectors(expression):
        if selector.name.startswith("vllm:"):
            assert selector.name in metrics_of_vllm()
            continue
        if selector.name in RECORDED:
            continue
        assert selector.name in LABELS, f"there is no metric {selector.name}"
        for matcher in selector.matchers.matchers:
            assert matcher.name in LABELS[selector.name], f"{selector.name} has no label {matcher.name}"
            if matcher.name in VALUES:
                assert set(matcher.value.split("|")) <= VALUES[matcher.name]
        for name in re.findall(r"by \(([^)]*)\)", expression):
            labels = {label.strip() for label in name.split(",")}
            assert labels <= LABELS[selector.name], f"{selector.name} has no labels {labels}"


def test_the_dashboard_shows_every_metric() -> None:
    named = {selector.name for panel in panels() for t in panel["targets"] for selector in selectors(t["expr"])}
    # Histograms of tokens per query are for those who ask themselves.
    unseen = {"streamrag:query_prompt_tokens"}
    shown = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in named} | unseen
    assert {metric._name for metric in metrics()} <= shown


def test_panels_stand_beside_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24
        cells = {
            (x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)


def test_each_alert_says_what_to_do() -> None:
    alerts = [rule for rule in RULES if "alert" in rule]
    assert alerts
    for alert in alerts:
        assert {"summary", "description"} <= alert["annotations"].keys()
        assert alert["labels"]["severity"] in ("warning", "critical")


def test_the_page_has_every_metric_as_it_is() -> None:
    page = (ROOT / "docs/serve-observe.md").read_text()
    rows = re.findall(r"^\| `(streamrag:\w+)` \| (\w+) \| ([^|]*) \| ([^|]*) \|$", page, re.MULTILINE)
    documented = {name: (kind, set(re.findall(r"`(\w+)`", labels)), what.strip()) for name, kind, labels, what in rows}
    assert len(rows) == len(documented)
    expected = {
        f"{metric._name}{'_total' if metric._type == 'counter' else ''}": (
            metric._type,
            set(metric._labelnames),
            metric._documentation.removesuffix("."),
        )
        for metric in metrics()
    }
    assert documented == expected
    for label, values in VALUES.items():
        for value in values:
            assert re.search(rf"\b{value}\b", page), f"{label} may be {value}"


def test_settings_in_the_files_for_ray_are_settings_and_both_name_the_same_application() -> None:
    alone = yaml.safe_load((ROOT / "deploy/ray/serve.yaml").read_text())
    kuberay = yaml.safe_load((ROOT / "deploy/ray/rayservice.yaml").read_text())
    (app,) = alone["applications"]
    (of_kuberay,) = yaml.safe_load(kuberay["spec"]["serveConfigV2"])["applications"]
    assert app | of_kuberay == app
    module, _, name = app["import_path"].partition(":")
    assert name in importlib.import_module(module).__all__
    config = app["args"].pop("config")
    assert load(None, {}, app["args"]).problems == []
    mounts = [
        mount["mountPath"]
        for group in (
            kuberay["spec"]["rayClusterConfig"]["headGroupSpec"],
            *kuberay["spec"]["rayClusterConfig"]["workerGroupSpecs"],
        )
        for mount in group["template"]["spec"]["containers"][0]["volumeMounts"]
    ]
    assert mounts.count(str(Path(config).parent)) == 2


def test_ray_s_own_schema_takes_the_files_for_ray() -> None:
    schema = pytest.importorskip("ray.serve.schema")
    alone = yaml.safe_load((ROOT / "deploy/ray/serve.yaml").read_text())
    kuberay = yaml.safe_load((ROOT / "deploy/ray/rayservice.yaml").read_text())
    for config in (alone, yaml.safe_load(kuberay["spec"]["serveConfigV2"])):
        schema.ServeDeploySchema.model_validate(config)
        assert config.keys() <= schema.ServeDeploySchema.model_fields.keys()  # it lets others pass
        for app in config["applications"]:
            assert app.keys() <= schema.ServeApplicationSchema.model_fields.keys()


def test_the_file_for_kuberay_has_the_fields_of_its_resource() -> None:
    """By its v1 types; a field that it does not know would be dropped, or refused."""
    kuberay = yaml.safe_load((ROOT / "deploy/ray/rayservice.yaml").read_text())
    spec = kuberay["spec"]
    cluster = spec["rayClusterConfig"]
    assert (kuberay["apiVersion"], kuberay["kind"]) == ("ray.io/v1", "RayService")
    assert spec.keys() <= {"serveConfigV2", "rayClusterConfig", "serveService", "upgradeStrategy"}
    assert cluster.keys() <= {"rayVersion", "enableInTreeAutoscaling", "headGroupSpec", "workerGroupSpecs"}
    assert cluster["headGroupSpec"].keys() == {"rayStartParams", "template"}
    (workers,) = cluster["workerGroupSpecs"]
    assert workers.keys() == {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
    for group in (cluster["headGroupSpec"], workers):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        assert pod.keys() == {"containers", "volumes"}
        (container,) = pod["containers"]
        assert container.keys() <= {"name", "image", "resources", "ports", "volumeMounts"}
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    (app,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    assert cluster["enableInTreeAutoscaling"], "else no pod comes for what replicas.max_number asks"
    assert workers["maxReplicas"] == int(app["args"]["replicas.max_number"])
    assert version("ray") == cluster["rayVersion"]
