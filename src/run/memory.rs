// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `--memory SIZE[,backing=…][,prefault=on][,shared=on][,align=…][,host-numa-node=N]`.

use granule_types::{backing::Backing, units::Bytes};

use granule_vmm::vm::config::Zone;

/// Reads one zone.
///
/// # Errors
/// What is wrong with it, for people.
pub fn zone(text: &str) -> Result<Zone, String> {
    let mut parts = text.split(',');
    let size: Bytes = parts
        .next()
        .unwrap_or_default()
        .parse()
        .map_err(|error| format!("{error}"))?;
    if size.0 == 0 {
        return Err("the size is zero".to_owned());
    }
    let mut zone = Zone {
        size,
        backing: Backing::Anonymous,
        prefault: false,
        align: None,
        node: None,
    };
    let mut shared = false;
    for part in parts {
        let Some((name, value)) = part.split_once('=') else {
            return Err(format!("'{part}' lacks a value: write {part}=…"));
        };
        match name {
            "backing" => zone.backing = value.parse().map_err(|error| format!("{error}"))?,
            "prefault" => zone.prefault = switch(name, value)?,
            "shared" => shared = switch(name, value)?,
            "align" => zone.align = Some(power_of_two(value)?),
            "host-numa-node" => {
                let node = value.parse();
                zone.node = Some(node.map_err(|_| format!("'{value}' is no NUMA node's number"))?);
            }
            _ => {
                return Err(format!(
                    "'{name}' is not known: use backing, prefault, shared, align or host-numa-node"
                ));
            }
        }
    }
    if shared {
        zone.backing = shared_form(zone.backing)?;
    }
    Ok(zone)
}

/// The backing that is the same and shared. Transparent huge pages are refused rather than lost:
/// shared memory has them only where the host's `shmem_enabled` says so.
fn shared_form(backing: Backing) -> Result<Backing, String> {
    match backing {
        Backing::Anonymous | Backing::Shmem => Ok(Backing::Shmem),
        Backing::AnonymousHugetlb(None) | Backing::SharedHugetlb => Ok(Backing::SharedHugetlb),
        Backing::AnonymousThp => Err(
            "shared memory has no transparent huge pages that can be relied on: leave shared=on \
             out, or use backing=shared_hugetlb"
                .to_owned(),
        ),
        Backing::AnonymousHugetlb(Some(_)) => Err(format!(
            "shared hugetlb pages are of the host's default size: use backing=shared_hugetlb \
             instead of {backing},shared=on"
        )),
    }
}

fn switch(name: &str, value: &str) -> Result<bool, String> {
    match value {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(format!("{name}={value}: use on or off")),
    }
}

fn power_of_two(value: &str) -> Result<Bytes, String> {
    let size: Bytes = value.parse().map_err(|error| format!("{error}"))?;
    if !size.0.is_power_of_two() || size > Bytes::gib(512) {
        return Err(format!("align={value}: use a power of two up to 512G"));
    }
    Ok(size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_alone_is_small_pages() {
        let expected = Zone {
            size: Bytes::mib(512),
            backing: Backing::Anonymous,
            prefault: false,
            align: None,
            node: None,
        };

        assert_eq!(zone("512M"), Ok(expected));
    }

    #[test]
    fn everything_can_be_said() {
        let text = "4G,backing=anonymous_hugetlb_1gb,prefault=on,align=1G,host-numa-node=1";

        let zone = zone(text).unwrap();

        assert_eq!(zone.backing, Backing::AnonymousHugetlb(Some(Bytes::gib(1))));
        assert!(zone.prefault);
        assert_eq!((zone.align, zone.node), (Some(Bytes::gib(1)), Some(1)));
    }

    #[test]
    fn shared_changes_the_backing_whichever_comes_first() {
        for text in ["1G,shared=on", "1G,shared=on,backing=shmem"] {
            assert_eq!(zone(text).unwrap().backing, Backing::Shmem);
        }
        let hugetlb = zone("1G,shared=on,backing=anonymous_hugetlb").unwrap();
        assert_eq!(hugetlb.backing, Backing::SharedHugetlb);
    }

    #[test]
    fn what_cannot_be_says_why() {
        for (text, why) in [
            ("", "no size"),
            ("0", "zero"),
            ("1G,backing=thp", "no backing"),
            ("1G,prefault", "prefault=…"),
            ("1G,prefault=yes", "use on or off"),
            ("1G,hugepages=on", "not known"),
            ("1G,align=3M", "power of two"),
            ("1G,host-numa-node=x", "NUMA"),
            ("1G,backing=anonymous_thp,shared=on", "transparent"),
            (
                "1G,backing=anonymous_hugetlb_2mb,shared=on",
                "shared_hugetlb",
            ),
        ] {
            let error = zone(text).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
