// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Parsers of the values of options with several parts:
//!
//! ```text
//! --memory SIZE[,backing=…][,prefault=on][,shared=on][,align=…][,host-numa-node=N]
//! --prefault stage2[,background=on]
//! --disk PATH[,readonly=on]
//! --snapshot DIR[,incremental=on]
//! --restore DIR[,memory=copy|map|userfaultfd][,order=FILE][,paused=on]
//! --net tap=NAME[,mac=…]
//! --vsock cid=N
//! ```

use granule_types::{backing::Backing, units::Bytes};
use granule_vmm::{
    devices::virtio::net::MacAddress,
    vm::config::{
        DiskConfig, MemoryZone, NetConfig, ReplacedDevices, RestoreConfig, RestoreMode,
        SnapshotConfig, Stage2Prefault, VsockConfig,
    },
};

pub fn parse_zone(text: &str) -> Result<MemoryZone, String> {
    let mut parts = text.split(',');
    let size = parse_size(parts.next().unwrap_or_default())?;
    if size.0 == 0 {
        return Err("the size is zero: use at least one page".to_owned());
    }
    let backing = Backing::Anonymous;
    let mut zone = MemoryZone { size, backing, prefault: false, alignment: None, node: None };
    let mut shared = false;
    for part in parts {
        let Some((name, value)) = part.split_once('=') else {
            return Err(format!("'{part}' has no value: use {part}=…"));
        };
        match name {
            "backing" => zone.backing = value.parse().map_err(|error| format!("{error}"))?,
            "prefault" => zone.prefault = parse_switch(name, value)?,
            "shared" => shared = parse_switch(name, value)?,
            "align" => zone.alignment = Some(parse_alignment(value)?),
            "host-numa-node" => {
                let not_a_node = |_| format!("host-numa-node={value} is not a NUMA node's number");
                zone.node = Some(value.parse().map_err(not_a_node)?);
            }
            _ => {
                return Err(format!(
                    "unknown option '{name}': use backing, prefault, shared, align or host-numa-node"
                ));
            }
        }
    }
    if shared {
        zone.backing = shared_backing(zone.backing)?;
    }
    Ok(zone)
}

/// Returns the shared variant of a backing. Transparent huge pages are refused, because shared
/// memory has them only if the host's `shmem_enabled` allows it.
fn shared_backing(backing: Backing) -> Result<Backing, String> {
    match backing {
        Backing::Anonymous | Backing::Shmem => Ok(Backing::Shmem),
        Backing::AnonymousHugetlb(None) | Backing::SharedHugetlb => Ok(Backing::SharedHugetlb),
        Backing::AnonymousThp | Backing::AnonymousMthp(_) => Err(
            "shared=on: shared memory has transparent huge pages on some hosts only: remove shared=on, \
             or use backing=shared_hugetlb"
                .to_owned(),
        ),
        Backing::AnonymousHugetlb(Some(_)) => Err(format!(
            "shared=on: shared hugetlb pages have the host's default size: use \
             backing=shared_hugetlb instead of {backing},shared=on"
        )),
    }
}

fn parse_size(text: &str) -> Result<Bytes, String> {
    text.parse().map_err(|error| format!("{error}"))
}

fn parse_switch(name: &str, value: &str) -> Result<bool, String> {
    match value {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(format!("{name}={value} is not valid: use on or off")),
    }
}

fn parse_alignment(value: &str) -> Result<Bytes, String> {
    let size = parse_size(value)?;
    if !size.0.is_power_of_two() || size > Bytes::gib(512) {
        return Err(format!("align={value} is not valid: use a power of two up to 512G"));
    }
    Ok(size)
}

pub fn parse_prefault(text: &str) -> Result<Stage2Prefault, String> {
    let (what, is_background) = match text.split_once(',') {
        None => (text, false),
        Some((what, option)) => match option.split_once('=') {
            Some((name @ "background", value)) => (what, parse_switch(name, value)?),
            _ => return Err(format!("unknown option '{option}': use background=on")),
        },
    };
    match (what, is_background) {
        ("stage2", false) => Ok(Stage2Prefault::BeforeStart),
        ("stage2", true) => Ok(Stage2Prefault::Background),
        _ => Err(format!(
            "'{what}' cannot be populated: use stage2, or prefault=on in --memory for host memory \
             alone"
        )),
    }
}

pub fn parse_restore(text: &str) -> Result<RestoreConfig, String> {
    let mut parts = text.split(',');
    let directory = parts.next().unwrap_or_default();
    if directory.is_empty() {
        return Err(
            "the directory is missing: use DIR[,memory=…][,order=FILE][,paused=on]".to_owned()
        );
    }
    let (mut mode, mut order, mut is_paused) = (RestoreMode::default(), None, false);
    for part in parts {
        match part.split_once('=') {
            Some(("memory", "copy")) => mode = RestoreMode::Copy,
            Some(("memory", "map")) => mode = RestoreMode::Map,
            Some(("memory", "userfaultfd")) => mode = RestoreMode::OnDemand { order: None },
            Some(("order", file)) => order = Some(file.into()),
            Some((name @ "paused", value)) => is_paused = parse_switch(name, value)?,
            _ => {
                return Err(format!(
                    "unknown option '{part}': use memory=copy, memory=map, memory=userfaultfd, \
                     order=FILE or paused=on"
                ));
            }
        }
    }
    let mode = match (mode, order) {
        (RestoreMode::OnDemand { .. }, order) => RestoreMode::OnDemand { order },
        (mode, None) => mode,
        (_, Some(_)) => return Err("order=FILE needs memory=userfaultfd".to_owned()),
    };
    let devices = ReplacedDevices::default();
    Ok(RestoreConfig { directory: directory.into(), mode, is_paused, devices })
}

pub fn parse_snapshot(text: &str) -> Result<SnapshotConfig, String> {
    let (directory, is_incremental) = split_final_switch(text, "incremental")?;
    if directory.is_empty() {
        return Err("the directory is missing: use DIR[,incremental=on]".to_owned());
    }
    if directory.contains(',') {
        return Err(format!("'{directory}' has a comma, behind which --restore expects options"));
    }
    Ok(SnapshotConfig { directory: directory.into(), is_incremental })
}

pub fn parse_disk(text: &str) -> Result<DiskConfig, String> {
    let (path, is_read_only) = split_final_switch(text, "readonly")?;
    if path.is_empty() {
        return Err("the path is missing: use PATH[,readonly=on]".to_owned());
    }
    Ok(DiskConfig { path: path.into(), is_read_only })
}

/// Splits a path and a final switch, which is off if it is missing. A path may contain commas, so
/// nothing else is an option.
fn split_final_switch<'a>(text: &'a str, name: &str) -> Result<(&'a str, bool), String> {
    match text.rsplit_once(&format!(",{name}=")) {
        Some((path, value)) => Ok((path, parse_switch(name, value)?)),
        None => Ok((text, false)),
    }
}

pub fn parse_net(text: &str) -> Result<NetConfig, String> {
    let (mut tap, mut mac) = (None, None);
    for part in text.split(',') {
        match part.split_once('=') {
            Some(("tap", name)) => tap = Some(name.to_owned()),
            Some(("mac", address)) => mac = Some(parse_mac(address)?),
            _ => {
                return Err(format!("unknown option '{part}': use tap=NAME or mac=ADDRESS"));
            }
        }
    }
    let tap = tap.ok_or("the tap is missing: use tap=NAME")?;
    Ok(NetConfig { tap, mac })
}

pub fn parse_vsock(text: &str) -> Result<VsockConfig, String> {
    let Some(number) = text.strip_prefix("cid=") else {
        return Err(format!("unknown option '{text}': use cid=N"));
    };
    /// The largest CID; the next one is `VMADDR_CID_ANY`.
    const MAX_CID: u32 = u32::MAX - 1;
    match number.parse() {
        // CIDs 0 to 2 are the hypervisor, the local machine and the host.
        Ok(cid @ 3..=MAX_CID) => Ok(VsockConfig { cid }),
        _ => Err(format!("cid={number} is not a guest's CID: use a number from 3 to {MAX_CID}")),
    }
}

fn parse_mac(text: &str) -> Result<MacAddress, String> {
    let byte = |part: &str| match part.len() {
        2 => u8::from_str_radix(part, 16).ok(),
        _ => None,
    };
    let bytes: Option<Vec<u8>> = text.split(':').map(byte).collect();
    match bytes.map(MacAddress::try_from) {
        Some(Ok(mac)) if mac[0] & 1 == 0 => Ok(mac),
        Some(Ok(_)) => Err(format!("mac={text} is a group address: the first byte must be even")),
        _ => Err(format!("mac={text} is not valid: use six bytes, such as 02:00:00:00:00:01")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_zone_has_small_pages_unless_its_options_select_a_backing() {
        let (size, backing) = (Bytes::mib(512), Backing::Anonymous);
        let plain = MemoryZone { size, backing, prefault: false, alignment: None, node: None };
        let all = MemoryZone {
            size: Bytes::gib(4),
            backing: Backing::AnonymousHugetlb(Some(Bytes::gib(1))),
            prefault: true,
            alignment: Some(Bytes::gib(1)),
            node: Some(1),
        };
        let options = "4G,backing=anonymous_hugetlb_1gb,prefault=on,align=1G,host-numa-node=1";

        assert_eq!(parse_zone("512M"), Ok(plain));
        assert_eq!(parse_zone(options), Ok(all));
        for (text, backing) in [
            ("1G,shared=on", Backing::Shmem),
            ("1G,shared=on,backing=shmem", Backing::Shmem),
            ("1G,shared=on,backing=anonymous_hugetlb", Backing::SharedHugetlb),
        ] {
            assert_eq!(parse_zone(text).unwrap().backing, backing);
        }
    }

    #[test]
    fn stage_2_is_populated_before_the_start_or_in_the_background() {
        for (text, mode) in [
            ("stage2", Stage2Prefault::BeforeStart),
            ("stage2,background=off", Stage2Prefault::BeforeStart),
            ("stage2,background=on", Stage2Prefault::Background),
        ] {
            assert_eq!(parse_prefault(text), Ok(mode));
        }
    }

    #[test]
    fn a_restore_copies_memory_and_runs_by_default() {
        let on_demand = |order: &str| RestoreMode::OnDemand { order: Some(order.into()) };
        for (text, mode, is_paused) in [
            ("saved", RestoreMode::Copy, false),
            ("saved,memory=map,paused=on", RestoreMode::Map, true),
            ("saved,paused=on,order=o,memory=userfaultfd", on_demand("o"), true),
            ("saved,paused=off", RestoreMode::Copy, false),
        ] {
            let directory = "saved".into();
            let devices = ReplacedDevices::default();
            let expected = RestoreConfig { directory, mode, is_paused, devices };
            assert_eq!(parse_restore(text), Ok(expected));
        }
    }

    #[test]
    fn a_disk_is_writable_by_default_and_its_path_may_contain_commas() {
        for (text, path, is_read_only) in
            [("/d/a,b.img", "/d/a,b.img", false), ("d.img,readonly=on", "d.img", true)]
        {
            assert_eq!(parse_disk(text), Ok(DiskConfig { path: path.into(), is_read_only }));
        }
    }

    #[test]
    fn snapshots_are_full_by_default() {
        for (text, path, is_incremental) in [
            ("/a", "/a", false),
            ("a,incremental=on", "a", true),
            ("a,incremental=off", "a", false),
        ] {
            let expected = SnapshotConfig { directory: path.into(), is_incremental };
            assert_eq!(parse_snapshot(text), Ok(expected));
        }
    }

    #[test]
    fn a_vsock_device_has_a_valid_guest_cid() {
        for (text, cid) in [("cid=3", 3), ("cid=4294967294", 4_294_967_294)] {
            assert_eq!(parse_vsock(text), Ok(VsockConfig { cid }));
        }
    }

    #[test]
    fn a_network_card_has_a_tap_and_optionally_a_mac() {
        let full = Some([2, 0, 10, 11, 12, 255]);
        for (text, mac) in [("tap=t", None), ("mac=02:00:0a:0b:0c:ff,tap=t", full)] {
            assert_eq!(parse_net(text), Ok(NetConfig { tap: "t".to_owned(), mac }));
        }
    }

    #[test]
    fn each_error_names_its_cause() {
        let zone = |text| parse_zone(text).map(drop);
        let disk = |text| parse_disk(text).map(drop);
        let restore = |text| parse_restore(text).map(drop);
        let vsock = |text| parse_vsock(text).map(drop);
        let net = |text| parse_net(text).map(drop);
        let prefault = |text| parse_prefault(text).map(drop);
        for (result, why) in [
            (zone(""), "not a size"),
            (zone("0"), "zero"),
            (zone("1G,backing=hugepages"), "unknown backing"),
            (zone("1G,prefault"), "prefault=…"),
            (zone("1G,prefault=yes"), "use on or off"),
            (zone("1G,hugepages=on"), "unknown option"),
            (zone("1G,align=3M"), "power of two"),
            (zone("1G,host-numa-node=x"), "NUMA"),
            (zone("1G,backing=anonymous_thp,shared=on"), "transparent"),
            (zone("1G,backing=anonymous_hugetlb_2mb,shared=on"), "shared_hugetlb"),
            (disk("d.img,readonly=yes"), "on or off"),
            (disk(",readonly=on"), "missing"),
            (parse_snapshot(",incremental=on").map(drop), "missing"),
            (parse_snapshot("a,incremental=yes").map(drop), "on or off"),
            (parse_snapshot("a,b,incremental=on").map(drop), "has a comma"),
            (restore(",paused=on"), "directory is missing"),
            (restore("saved,order=o"), "needs memory=userfaultfd"),
            (restore("saved,paused"), "unknown option"),
            (restore("saved,paused=yes"), "on or off"),
            (prefault("on"), "use stage2"),
            (prefault("stage2,threads=4"), "unknown option"),
            (prefault("stage2,background=yes"), "on or off"),
            (vsock(""), "use cid=N"),
            (vsock("42"), "use cid=N"),
            (vsock("cid="), "from 3 to 4294967294"),
            (vsock("cid=2"), "from 3 to 4294967294"),
            (vsock("cid=4294967295"), "from 3 to 4294967294"),
            (vsock("cid=3,port=1"), "from 3 to 4294967294"),
            (net(""), "unknown option"),
            (net("mac=02:00:00:00:00:01"), "tap=NAME"),
            (net("tap=t,mac=02:00:00:00:00"), "six bytes"),
            (net("tap=t,mac=02:00:00:00:00:01:02"), "six bytes"),
            (net("tap=t,mac=2:0:0:0:0:+1"), "six bytes"),
            (net("tap=t,mac=01:00:00:00:00:01"), "even"),
            (net("tap=t,queues=2"), "unknown option"),
        ] {
            let error = result.unwrap_err();
            assert!(error.contains(why), "{why}: {error}");
        }
    }
}
