"""Which NIC ports a rank takes, over fake sysfs trees: filter, state, driver, GID, distance, shares, map."""

import itertools

import pytest
from helpers import fake_cuda
from helpers.sysfs import GLOBAL, IPV4, IPV4_LINK_LOCAL, LINK_LOCAL, ROCE_GIDS, Sysfs

from epcomm import BackendUnavailableError, InvalidArgumentError, _nics, _sysfs

TWELVE = [f"mlx5_{i}" for i in range(12)]


@pytest.fixture
def sysfs(tmp_path):
    return Sysfs(tmp_path / "sys")


def place(index):
    """Its own root complex for each."""
    return f"pci0000:{index:02x}/0000:{index:02x}:00.0/0000:{index:02x}:01.0"


def look(sysfs, **options):
    variables = {name: str(value) for name, value in options.items() if name.startswith("EPCOMM_")}
    rest = {name: value for name, value in options.items() if name not in variables}
    return _nics.look(sysfs.root, **{"cpus": [0], **rest}, environ=variables)


def decide(*places, rank=0):
    return _nics.decide(places[rank], [one.told() for one in places], rank)


def ports(decision):
    return [f"{path.device}:{path.port}" for path in decision.paths]


def reason(one, name):
    """Why a port is not used."""
    (found,) = [found for found in one.found if found.name == name]
    return found.refused


# ---- the device filter (B43)


@pytest.fixture(scope="module")
def twelve(tmp_path_factory):
    made = Sysfs(tmp_path_factory.mktemp("twelve") / "sys")
    for i, name in enumerate(TWELVE):
        made.nic(name, place(i), ports=2)
    return made


@pytest.mark.parametrize(("text", "wanted"), [
    (None, TWELVE),
    ("", TWELVE),
    ("   ", TWELVE),
    (",", TWELVE),
    ("mlx5_1", ["mlx5_1", "mlx5_10", "mlx5_11"]),
    ("=mlx5_1", ["mlx5_1"]),
    ("^mlx5_1", [name for name in TWELVE if name not in ("mlx5_1", "mlx5_10", "mlx5_11")]),
    ("^=mlx5_8,mlx5_10", [name for name in TWELVE if name not in ("mlx5_8", "mlx5_10")]),
    ("^=mlx5_8,^=mlx5_10", [name for name in TWELVE if name not in ("mlx5_8", "mlx5_10")]),
    ("^=mlx5_8,^=mlx5_10,mlx5_9", [name for name in TWELVE if name not in ("mlx5_8", "mlx5_9", "mlx5_10")]),
    ("=mlx5_1,=mlx5_3", ["mlx5_1", "mlx5_3"]),
    (" = mlx5_1 , mlx5_3 ", ["mlx5_1", "mlx5_3"]),
    ("\tmlx5_2 ,mlx5_4,", ["mlx5_2", "mlx5_4"]),
    ("mlx5_1,mlx5_1", ["mlx5_1", "mlx5_10", "mlx5_11"]),
    ("mlx5", TWELVE),
])  # fmt: skip
def test_filter_takes_devices(twelve, text, wanted):
    found = look(twelve, EPCOMM_IB_HCA=text or "")
    assert {one.device.name for one in found.usable} == set(wanted)
    # With a port, or without: both ports of each device.
    assert len(found.usable) == 2 * len(wanted)


@pytest.mark.parametrize(("text", "wanted"), [
    ("mlx5_1:2", ["mlx5_1:2", "mlx5_10:2", "mlx5_11:2"]),
    ("=mlx5_1:2", ["mlx5_1:2"]),
    ("= mlx5_1 : 2", ["mlx5_1:2"]),
    ("=mlx5_1:1,mlx5_2:2,mlx5_3", ["mlx5_1:1", "mlx5_2:2", "mlx5_3:1", "mlx5_3:2"]),
])  # fmt: skip
def test_filter_takes_ports(twelve, text, wanted):
    found = look(twelve, EPCOMM_IB_HCA=text)
    assert [f"{one.device.name}:{one.port.number}" for one in found.usable] == wanted
    excluded = look(twelve, EPCOMM_IB_HCA="^" + text)
    everything = [f"{name}:{port}" for name in TWELVE for port in (1, 2)]
    assert [f"{one.device.name}:{one.port.number}" for one in excluded.usable] == [
        name for name in everything if name not in wanted]


@pytest.mark.parametrize("text", ["nope", "=mlx5", "=mlx5_12", "mlx5_1:3", "^mlx5"])
def test_a_filter_that_leaves_nothing_lists_filter_and_devices(twelve, text):
    with pytest.raises(InvalidArgumentError) as caught:
        look(twelve, EPCOMM_IB_HCA=text)
    for part in ("EPCOMM_IB_HCA", repr(text), "mlx5_0:1", "mlx5_11:2"):
        assert part in str(caught.value)


@pytest.mark.parametrize("text", ["==mlx5_1", "=^mlx5_1", "^^mlx5_1", "mlx5_0,^mlx5_1", "^mlx5_0,=mlx5_1", "=",
                                  "mlx5_1:", "mlx5_1:x", "mlx5_1:0", "mlx5_1:1:1", ":1", "mlx5 1", "mlx5_1;mlx5_2",
                                  "mlx5_1:256"])
def test_a_malformed_filter_is_refused_with_its_part(twelve, text):
    with pytest.raises(InvalidArgumentError, match="EPCOMM_IB_HCA"):
        look(twelve, EPCOMM_IB_HCA=text)


def test_a_name_that_matches_nothing_beside_others_is_told(twelve):
    found = look(twelve, EPCOMM_IB_HCA="=mlx5_1,mlx5_99")
    assert {one.device.name for one in found.usable} == {"mlx5_1"}
    assert any("'mlx5_99' matches none" in note for note in decide(found).reasons)


def test_a_filter_without_any_device_says_so(sysfs):
    found = look(sysfs, EPCOMM_IB_HCA="mlx5_1")
    assert "no RDMA device" in found.problem() and "mlx5_1" in found.problem()


def test_devices_come_in_the_order_of_their_numbers(twelve):
    assert [device.name for device in _sysfs.devices(twelve.root)] == TWELVE


# ---- state, driver, kind (B46)


def test_a_down_device_is_passed_over(sysfs):
    sysfs.nic("mlx5_0", place(0), state="1: DOWN", physical="3: Disabled").nic("mlx5_1", place(1))
    found = look(sysfs)
    decision = decide(found)
    assert ports(decision) == ["mlx5_1:1"]
    assert "mlx5_0 port 1: not used: port is DOWN (link: Disabled), not ACTIVE" in decision.reasons


@pytest.mark.parametrize("state", ["1: DOWN", "2: INIT", "3: ARMED", "0: NOP", ""])
def test_with_none_left_each_device_has_its_reason(sysfs, state):
    sysfs.nic("mlx5_0", place(0), state=state).nic("mlx5_1", place(1)).nic("bnxt_re0", place(2), driver="bnxt_en")
    found = look(sysfs, EPCOMM_IB_HCA="mlx5_0,bnxt_re0", mlx5_only=True)
    with pytest.raises(BackendUnavailableError) as caught:
        decide(found)
    for part in ("mlx5_0 port 1: port is", "mlx5_1 port 1: filtered: EPCOMM_IB_HCA='mlx5_0,bnxt_re0'",
                 "bnxt_re0 port 1: driver bnxt_en, needed: mlx5_core"):
        assert part in str(caught.value)


def test_the_driver_decides_and_not_the_name(sysfs):
    sysfs.nic("roce_rail1", place(0)).nic("mlx5_0", place(1), driver="bnxt_en").nic("rxe0")
    assert ports(decide(look(sysfs, mlx5_only=True, cpus=[0]))) == ["roce_rail1:1"]
    assert ports(decide(look(sysfs, EPCOMM_IB_PROVIDER="mlx5"))) == ["roce_rail1:1"]
    assert len(look(sysfs).usable) == 3
    assert {one.device.name: one.device.driver for one in look(sysfs).found} == {
        "roce_rail1": "mlx5_core", "mlx5_0": "bnxt_en", "rxe0": "rdma_rxe"}


def test_a_share_of_an_mlx5_device_is_one(sysfs):
    """What containers are given: the kernel calls the driver of a subfunction by the module and its own name."""
    sysfs.nic("mlx5_2", f"{place(0)}/mlx5_core.sf.4", driver="mlx5_core.sf")
    assert ports(decide(look(sysfs, mlx5_only=True))) == ["mlx5_2:1"]


def test_no_devices(sysfs):
    with pytest.raises(BackendUnavailableError, match="no RDMA device"):
        decide(look(sysfs))
    assert _sysfs.devices(sysfs.root / "nowhere") == []


@pytest.mark.parametrize(("options", "part"), [
    ({"node_type": "4: RNIC"}, "iWARP"),
    ({"node_type": "2: switch"}, "type switch"),
    ({"ports": 0}, "no port"),
    ({"link_layer": "Unknown"}, "link layer Unknown"),
])  # fmt: skip
def test_what_cannot_serve_says_why(sysfs, options, part):
    sysfs.nic("odd0", place(0), **options)
    with pytest.raises(BackendUnavailableError, match=part):
        decide(look(sysfs))


def test_all_active_ports_of_a_device_are_used(sysfs):
    sysfs.nic("mlx5_0", place(0), ports=3, state=["4: ACTIVE", "1: DOWN", "5: ACTIVE_DEFER"])
    assert ports(decide(look(sysfs))) == ["mlx5_0:1", "mlx5_0:3"]


def test_other_networks_and_slow_ports_are_left_to_those_who_name_them(sysfs):
    sysfs.nic("ib0", place(0), link_layer="InfiniBand", rate="400 Gb/sec (4X NDR)")
    sysfs.nic("ib1", place(1), link_layer="InfiniBand", rate="100 Gb/sec (4X EDR)")
    sysfs.nic("eth0", place(2), rate="25 Gb/sec (1X EDR)")
    found = look(sysfs)
    assert [one.device.name for one in found.usable] == ["ib0"]
    assert "100 Gb/s beside ib0 port 1 (400 Gb/s)" in reason(found, "ib1 port 1")
    assert "Ethernet beside ib0 port 1 (InfiniBand)" in reason(found, "eth0 port 1")
    assert ports(decide(look(sysfs, EPCOMM_IB_HCA="eth0"))) == ["eth0:1"]
    assert ports(decide(look(sysfs, EPCOMM_IB_MAP="*=ib1"))) == ["ib1:1"]
    assert [one.device.name for one in look(sysfs, EPCOMM_IB_HCA="^ib0").usable] == ["ib1"]


# ---- GIDs


def gid(sysfs, **options):
    (path,) = decide(look(sysfs, **options)).paths
    return path.gid_index


def test_gid_by_type_and_family(sysfs):
    sysfs.nic("mlx5_0", place(0), gids=[*ROCE_GIDS, (GLOBAL, "IB/RoCE v1"), (GLOBAL, "RoCE v2")])
    assert gid(sysfs) == 3
    assert gid(sysfs, EPCOMM_IB_ROCE_VERSION=1) == 2
    assert gid(sysfs, EPCOMM_IB_ADDR_FAMILY="ipv6") == 5  # global before link-local
    assert gid(sysfs, EPCOMM_IB_ROCE_VERSION=1, EPCOMM_IB_ADDR_FAMILY="ipv6") == 4
    for index in range(6):
        assert gid(sysfs, EPCOMM_IB_GID_INDEX=index, EPCOMM_IB_ROCE_VERSION=1) == index


@pytest.mark.parametrize(("gids", "index"), [
    ([(LINK_LOCAL, "IB/RoCE v1"), (LINK_LOCAL, "RoCE v2")], 1),
    ([(IPV4, "IB/RoCE v1"), (LINK_LOCAL, "RoCE v2")], 1),
    ([(IPV4, "IB/RoCE v1")], 0),
    ([(LINK_LOCAL, "RoCE v2"), (IPV4, "RoCE v2")], 1),
    ([(LINK_LOCAL, "RoCE v2"), (GLOBAL, "RoCE v2"), (IPV4, "RoCE v2"), ("::ffff:10.0.0.2", "RoCE v2")], 2),
    ([(LINK_LOCAL, "RoCE v2"), (IPV4_LINK_LOCAL, "RoCE v2"), (IPV4, "RoCE v2")], 2),
    ([(LINK_LOCAL, "RoCE v2"), (IPV4_LINK_LOCAL, "RoCE v2"), (GLOBAL, "RoCE v2")], 2),
    ([(LINK_LOCAL, "RoCE v2"), (IPV4_LINK_LOCAL, "RoCE v2")], 1),
])  # fmt: skip
def test_the_best_gid_there_is(sysfs, gids, index):
    sysfs.nic("mlx5_0", place(0), gids=gids)
    assert gid(sysfs) == index


@pytest.mark.parametrize("options", [{"EPCOMM_IB_GID_INDEX": 4}, {"EPCOMM_IB_GID_INDEX": 77},
                                     {"EPCOMM_IB_ADDR_FAMILY": "ipv4", "EPCOMM_IB_ROCE_VERSION": 2}])
def test_a_gid_that_is_not_there_lists_those_that_are(sysfs, options):
    sysfs.nic("mlx5_0", place(0), gids=[(LINK_LOCAL, "IB/RoCE v1"), (LINK_LOCAL, "RoCE v2"), (IPV4, "IB/RoCE v1")])
    with pytest.raises(BackendUnavailableError) as caught:
        decide(look(sysfs, **options))
    for part in [*options, "GID 1 RoCE v2 fe80::1", "GID 2 RoCE v1 10.0.0.1"]:
        assert part in str(caught.value)


def test_a_port_without_any_gid_is_refused(sysfs):
    sysfs.nic("mlx5_0", place(0), gids=[])
    with pytest.raises(BackendUnavailableError, match="no GID for RoCE; it has: none"):
        decide(look(sysfs))


def test_infiniband_needs_no_gid_but_takes_one(sysfs):
    sysfs.nic("mlx5_0", place(0), link_layer="InfiniBand")
    assert gid(sysfs) == -1
    assert gid(sysfs, EPCOMM_IB_GID_INDEX=0) == 0


# ---- distance, ties, shares (B47)


def test_the_nearest_nic_of_each_gpu(sysfs):
    switch = "pci0000:16/0000:16:01.0/0000:17:00.0"
    gpu = sysfs.gpu(f"{switch}/0000:18:00.0/0000:19:00.0")
    sysfs.nic("far", "pci0000:90/0000:90:01.0/0000:91:00.0", numa=1)
    sysfs.nic("node", "pci0000:20/0000:20:01.0/0000:21:00.0", numa=0)
    assert decide(look(sysfs, gpu=gpu)).paths[0].device == "node"
    sysfs.nic("root", "pci0000:16/0000:16:05.0/0000:1f:00.0", numa=0)
    assert decide(look(sysfs, gpu=gpu)).paths[0].device == "root"
    sysfs.nic("upper", "pci0000:16/0000:16:01.0/0000:1e:00.0", numa=0)
    assert decide(look(sysfs, gpu=gpu)).paths[0].device == "upper"
    sysfs.nic("near", f"{switch}/0000:18:01.0/0000:1a:00.0", numa=0)
    decision = decide(look(sysfs, gpu=gpu.upper()))
    assert ports(decision) == ["near:1"]
    assert "near port 1: used (GID 3 RoCE v2 10.0.0.1, same PCIe switch as GPU 0000:19:00.0)" in (
        decide(look(sysfs, gpu=gpu)).reasons)
    assert "far port 1: not used: others are nearer (another NUMA node than GPU 0000:19:00.0)" in (
        decide(look(sysfs, gpu=gpu)).reasons)


def test_equally_near_nics_are_divided_among_gpus(sysfs):
    switch = "pci0000:16/0000:16:01.0"
    gpus = [sysfs.gpu(f"{switch}/0000:17:0{i}.0/0000:2{i}:00.0") for i in range(2)]
    for i in range(2):
        sysfs.nic(f"mlx5_{i}", f"{switch}/0000:17:0{i + 4}.0/0000:3{i}:00.0")
    both = [look(sysfs, gpu=gpu) for gpu in gpus]
    assert both[0].near == both[1].near == ["mlx5_0", "mlx5_1"]
    first, second = decide(*both), decide(*both, rank=1)
    assert (ports(first), ports(second)) == (["mlx5_0:1"], ["mlx5_1:1"])
    assert "mlx5_1 port 1: not used: another rank's share" in first.reasons
    assert any("its share is mlx5_1" in text for text in second.reasons)
    # Alone, a rank has both.
    assert ports(decide(both[0])) == ["mlx5_0:1", "mlx5_1:1"]


@pytest.mark.parametrize(("ranks", "nics"), list(itertools.product([1, 2, 3, 4, 5, 8], [1, 2, 3, 4, 8])))
def test_shares_use_every_nic_evenly(sysfs, ranks, nics):
    for i in range(nics):
        sysfs.nic(f"mlx5_{i}", place(i), ports=2)
    seen = look(sysfs)
    used = [name for rank in range(ranks) for name in ports(decide(*[seen] * ranks, rank=rank))]
    count = [used.count(f"mlx5_{i}:{port}") for i in range(nics) for port in (1, 2)]
    assert min(count) >= 1
    assert max(count) - min(count) <= 1


def test_ranks_of_other_hosts_do_not_count(sysfs):
    sysfs.nic("mlx5_0", place(0)).nic("mlx5_1", place(1))
    seen = look(sysfs)
    other = {**seen.told(), "host": "elsewhere"}
    told = [other, seen.told(), other, seen.told()]
    assert ports(_nics.decide(seen, told, 1)) == ["mlx5_0:1"]
    assert ports(_nics.decide(seen, told, 3)) == ["mlx5_1:1"]


def test_near_sets_that_overlap_share_by_use(sysfs):
    for i in range(2):
        sysfs.nic(f"mlx5_{i}", place(i))
    seen = look(sysfs)
    told = [{**seen.told(), "near": ["mlx5_0"]}, seen.told(), seen.told()]
    assert [ports(_nics.decide(seen, told, rank)) for rank in (1, 2)] == [["mlx5_1:1"], ["mlx5_0:1"]]


def test_cpus_stand_in_for_a_gpu(sysfs):
    sysfs.node(0, "0-3,8-11")
    sysfs.node(1, "4-7,12-15")
    sysfs.nic("mlx5_0", place(0), numa=0).nic("mlx5_1", place(1), numa=1).nic("rxe0")
    assert look(sysfs, cpus=[2, 9]).near == ["mlx5_0"]
    assert look(sysfs, cpus=[12]).near == ["mlx5_1"]
    everywhere = look(sysfs, cpus=range(16))  # bound to nothing: no NIC is nearer
    assert everywhere.near == ["mlx5_0", "mlx5_1", "rxe0"]
    assert len(decide(everywhere).paths) == 3


def test_an_unknown_gpu_makes_all_equally_near(sysfs):
    sysfs.nic("mlx5_0", place(0)).nic("mlx5_1", place(1))
    assert look(sysfs, gpu="0000:ff:00.0").near == ["mlx5_0", "mlx5_1"]


PCI_DRIVER = """
#include <cstdio>
extern "C" __attribute__((visibility("default"))) int cuInit(unsigned) { return 0; }
extern "C" __attribute__((visibility("default"))) int cuDeviceGet(int* out, int index) {
  *out = 40 + index;
  return index < 2 ? 0 : 101;
}
extern "C" __attribute__((visibility("default"))) int cuDeviceGetPCIBusId(char* text, int bytes, int device) {
  std::snprintf(text, size_t(bytes), "0000:AB:%02d.0", device);
  return 0;
}
"""


def test_where_a_gpu_sits_is_the_drivers_word():
    code = "from epcomm import _gpu; print([_gpu.pci_address(i) for i in range(3)])"
    with_driver = fake_cuda.python(code, fake_cuda.compile_library(PCI_DRIVER))
    assert with_driver.stdout.strip() == "['0000:ab:40.0', '0000:ab:41.0', None]", with_driver.stderr
    of_another_kind = fake_cuda.python(code, fake_cuda.compile_library("int unused;"))
    assert of_another_kind.stdout.strip() == "[None, None, None]", of_another_kind.stderr


# ---- the user's map (B47)


def test_eight_ranks_on_four_nics_by_a_map_of_two_each(sysfs):
    for i in range(4):
        sysfs.nic(f"mlx5_{i}", place(i))
    seen = look(sysfs, EPCOMM_IB_MAP="0-3 = mlx5_0, mlx5_1 ; 4-7 = mlx5_2,mlx5_3")
    for rank in range(8):
        decision = decide(*[seen] * 8, rank=rank)
        assert ports(decision) == (["mlx5_0:1", "mlx5_1:1"] if rank < 4 else ["mlx5_2:1", "mlx5_3:1"])
        assert f"EPCOMM_IB_MAP decides for rank {rank} of this host" in decision.reasons


def test_a_map_counts_ranks_of_the_host_and_takes_ports_and_rest(sysfs):
    sysfs.nic("mlx5_1", place(1), ports=2).nic("mlx5_10", place(10))
    seen = look(sysfs, EPCOMM_IB_MAP="*=mlx5_10;1=mlx5_1:2;0=mlx5_1")
    other = {**seen.told(), "host": "elsewhere"}
    told = [other, seen.told(), other, seen.told(), seen.told()]
    assert [ports(_nics.decide(seen, told, rank)) for rank in (1, 3, 4)] == [
        ["mlx5_1:1", "mlx5_1:2"], ["mlx5_1:2"], ["mlx5_10:1"]]


def test_a_map_that_cannot_be_followed_is_an_error(sysfs):
    sysfs.nic("mlx5_0", place(0), state="1: DOWN").nic("mlx5_1", place(1))
    with pytest.raises(InvalidArgumentError, match="no row for rank 1 of this host"):
        seen = look(sysfs, EPCOMM_IB_MAP="0=mlx5_1")
        decide(seen, seen, rank=1)
    with pytest.raises(InvalidArgumentError, match="names 'mlx5_7'; the devices here: mlx5_0:1, mlx5_1:1"):
        look(sysfs, EPCOMM_IB_MAP="0=mlx5_1;1=mlx5_7")
    with pytest.raises(BackendUnavailableError, match="'mlx5_0'.*port is DOWN"):
        decide(look(sysfs, EPCOMM_IB_MAP="0=mlx5_0"))
    with pytest.raises(BackendUnavailableError, match="'mlx5_1'.*filtered"):
        decide(look(sysfs.nic("mlx5_2", place(2)), EPCOMM_IB_MAP="0=mlx5_1", EPCOMM_IB_HCA="^mlx5_1"))


@pytest.mark.parametrize("text", ["mlx5_0", "0", "0=", "=mlx5_0", "x=mlx5_0", "3-1=mlx5_0", "*-2=mlx5_0", "0=^mlx5_0",
                                  "0=mlx5_0,", "0==mlx5_0", "-1=mlx5_0"])
def test_a_malformed_map_is_refused(sysfs, text):
    sysfs.nic("mlx5_0", place(0))
    with pytest.raises(InvalidArgumentError, match="EPCOMM_IB_MAP"):
        look(sysfs, EPCOMM_IB_MAP=text)


# ---- the software HCA, and what is logged


def test_soft_devices_are_each_ranks_own(sysfs):
    sysfs.nic("mlx5_0", place(0))
    seen = look(sysfs, EPCOMM_IB_PROVIDER="soft", soft_ports=3, mlx5_only=True)
    assert seen.provider == "soft"
    for rank in range(2):
        assert decide(seen, seen, rank=rank).paths == [("soft0", 1, 0), ("soft1", 1, 0), ("soft2", 1, 0)]
    mapped = look(sysfs, EPCOMM_IB_PROVIDER="soft", EPCOMM_IB_MAP="1=soft1;0=soft0")
    assert [ports(decide(mapped, mapped, rank=rank)) for rank in range(2)] == [["soft0:1"], ["soft1:1"]]
    assert ports(decide(look(sysfs, EPCOMM_IB_PROVIDER="soft", EPCOMM_IB_HCA="soft1"))) == ["soft1:1"]
    assert look(sysfs).provider == "verbs"  # `auto` never takes it


def test_the_choice_is_logged(sysfs, caplog):
    sysfs.nic("mlx5_0", place(0)).nic("mlx5_1", place(1), state="1: DOWN")
    with caplog.at_level("INFO", logger="epcomm"):
        decide(look(sysfs))
    assert "rank 0: mlx5_0 port 1: used (GID 3 RoCE v2 10.0.0.1)" in caplog.text
    assert "rank 0: mlx5_1 port 1: not used: port is DOWN" in caplog.text
