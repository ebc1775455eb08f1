// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Parser of `--memory SIZE[,backing=…][,prefault=on][,shared=on][,align=…][,host-numa-node=N]`.

use granule_types::{backing::Backing, units::Bytes};

use granule_vmm::vm::config::MemoryZone;

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
}
