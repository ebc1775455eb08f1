// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Parsers of values of several parts:
//!
//! ```text
//! --memory SIZE[,backing=…][,prefault=on][,shared=on][,align=…][,host-numa-node=N]
//! --disk PATH[,readonly=on]
//! --net tap=NAME[,mac=…]
//! --vsock cid=N
//! ```

use granule_types::{backing::Backing, units::Bytes};
use granule_vmm::{
    devices::virtio::net::MacAddress,
    vm::config::{DiskConfig, MemoryZone, NetConfig, VsockConfig},
};

/// Parses a memory zone.
///
/// # Errors
/// A message for the user.
pub fn parse_zone(text: &str) -> Result<MemoryZone, String> {
    let mut parts = text.split(',');
    let size: Bytes =
        parts.next().unwrap_or_default().parse().map_err(|error| format!("{error}"))?;
    if size.0 == 0 {
        return Err("the size is zero: use at least one page".to_owned());
    }
    let mut zone =
        MemoryZone { size, backing: Backing::Anonymous, prefault: false, align: None, node: None };
    let mut shared = false;
    for part in parts {
        let Some((name, value)) = part.split_once('=') else {
            return Err(format!("'{part}' has no value: use {part}=…"));
        };
        match name {
            "backing" => zone.backing = value.parse().map_err(|error| format!("{error}"))?,
            "prefault" => zone.prefault = parse_switch(name, value)?,
            "shared" => shared = parse_switch(name, value)?,
            "align" => zone.align = Some(parse_alignment(value)?),
            "host-numa-node" => {
                let node = value.parse();
                zone.node =
                    Some(node.map_err(|_| {
                        format!("host-numa-node={value} is not a NUMA node's number")
                    })?);
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
        Backing::AnonymousThp => Err(
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

fn parse_switch(name: &str, value: &str) -> Result<bool, String> {
    match value {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(format!("{name}={value} is not valid: use on or off")),
    }
}

fn parse_alignment(value: &str) -> Result<Bytes, String> {
    let size: Bytes = value.parse().map_err(|error| format!("{error}"))?;
    if !size.0.is_power_of_two() || size > Bytes::gib(512) {
        return Err(format!("align={value} is not valid: use a power of two up to 512G"));
    }
    Ok(size)
}

/// Parses a disk. A path may contain commas: only a final `readonly=` is an option.
///
/// # Errors
/// A message for the user.
pub fn parse_disk(text: &str) -> Result<DiskConfig, String> {
    let (path, read_only) = match text.rsplit_once(",readonly=") {
        Some((path, value)) => (path, parse_switch("readonly", value)?),
        None => (text, false),
    };
    if path.is_empty() {
        return Err("the path is missing: use PATH[,readonly=on]".to_owned());
    }
    Ok(DiskConfig { path: path.into(), read_only })
}

/// Parses a network card.
///
/// # Errors
/// A message for the user.
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

/// Parses the guest's vsock context ID.
///
/// # Errors
/// A message for the user.
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
    let mut bytes = text.split(':').map(|part| match part.len() {
        2 => u8::from_str_radix(part, 16).ok(),
        _ => None,
    });
    let mut mac = MacAddress::default();
    let complete = mac.iter_mut().all(|mac_byte| match bytes.next().flatten() {
        Some(byte) => {
            *mac_byte = byte;
            true
        }
        None => false,
    });
    match complete && bytes.next().is_none() {
        true if mac[0] & 1 == 0 => Ok(mac),
        true => Err(format!("mac={text} is a group address: the first byte must be even")),
        false => Err(format!("mac={text} is not valid: use six bytes as 02:00:00:00:00:01")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_zone_has_small_pages_by_default() {
        let expected = MemoryZone {
            size: Bytes::mib(512),
            backing: Backing::Anonymous,
            prefault: false,
            align: None,
            node: None,
        };

        assert_eq!(parse_zone("512M"), Ok(expected));
    }

    #[test]
    fn all_options_are_parsed() {
        let text = "4G,backing=anonymous_hugetlb_1gb,prefault=on,align=1G,host-numa-node=1";

        let zone = parse_zone(text).unwrap();

        assert_eq!(zone.backing, Backing::AnonymousHugetlb(Some(Bytes::gib(1))));
        assert!(zone.prefault);
        assert_eq!((zone.align, zone.node), (Some(Bytes::gib(1)), Some(1)));
    }

    #[test]
    fn shared_selects_the_shared_backing_in_any_order() {
        for text in ["1G,shared=on", "1G,shared=on,backing=shmem"] {
            assert_eq!(parse_zone(text).unwrap().backing, Backing::Shmem);
        }
        let hugetlb = parse_zone("1G,shared=on,backing=anonymous_hugetlb").unwrap();
        assert_eq!(hugetlb.backing, Backing::SharedHugetlb);
    }

    #[test]
    fn each_error_names_its_cause() {
        for (text, why) in [
            ("", "not a size"),
            ("0", "zero"),
            ("1G,backing=hugepages", "unknown backing"),
            ("1G,prefault", "prefault=…"),
            ("1G,prefault=yes", "use on or off"),
            ("1G,hugepages=on", "unknown option"),
            ("1G,align=3M", "power of two"),
            ("1G,host-numa-node=x", "NUMA"),
            ("1G,backing=anonymous_thp,shared=on", "transparent"),
            ("1G,backing=anonymous_hugetlb_2mb,shared=on", "shared_hugetlb"),
        ] {
            let error = parse_zone(text).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn a_disk_is_writable_by_default() {
        let disk = |text| parse_disk(text).map(|disk| (disk.path, disk.read_only));

        assert_eq!(disk("/d/a,b.img"), Ok(("/d/a,b.img".into(), false)));
        assert_eq!(disk("d.img,readonly=on"), Ok(("d.img".into(), true)));
        assert!(disk("d.img,readonly=yes").unwrap_err().contains("on or off"));
        assert!(disk(",readonly=on").unwrap_err().contains("missing"));
    }

    #[test]
    fn a_vsock_device_has_a_valid_guest_cid() {
        let last = parse_vsock("cid=4294967294").map(|vsock| vsock.cid);

        assert_eq!(parse_vsock("cid=3"), Ok(VsockConfig { cid: 3 }));
        assert_eq!(last, Ok(4_294_967_294));
        for (text, why) in [
            ("", "use cid=N"),
            ("42", "use cid=N"),
            ("cid=", "from 3 to 4294967294"),
            ("cid=2", "from 3 to 4294967294"),
            ("cid=4294967295", "from 3 to 4294967294"),
            ("cid=3,port=1", "from 3 to 4294967294"),
        ] {
            let error = parse_vsock(text).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn a_network_card_has_a_tap_and_optionally_a_mac() {
        let plain = parse_net("tap=tap0").unwrap();
        let full = parse_net("mac=02:00:0a:0b:0c:ff,tap=tap1").unwrap();

        assert_eq!((plain.tap.as_str(), plain.mac), ("tap0", None));
        assert_eq!(full.mac, Some([2, 0, 10, 11, 12, 255]));
        for (text, why) in [
            ("", "unknown option"),
            ("mac=02:00:00:00:00:01", "tap=NAME"),
            ("tap=t,mac=02:00:00:00:00", "six bytes"),
            ("tap=t,mac=02:00:00:00:00:01:02", "six bytes"),
            ("tap=t,mac=2:0:0:0:0:+1", "six bytes"),
            ("tap=t,mac=01:00:00:00:00:01", "even"),
            ("tap=t,queues=2", "unknown option"),
        ] {
            let error = parse_net(text).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
