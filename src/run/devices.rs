// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Parsers of `--disk PATH[,readonly=on]`, `--net tap=NAME[,mac=…]` and `--vsock cid=N`.

use granule_vmm::{
    devices::virtio::net::MacAddress,
    vm::config::{DiskConfig, NetConfig, VsockConfig},
};

/// Parses a disk. A path may contain commas: only a final `readonly=` is an option.
///
/// # Errors
/// A message for the user.
pub fn parse_disk(text: &str) -> Result<DiskConfig, String> {
    let (path, read_only) = match text.rsplit_once(",readonly=") {
        Some((path, "on")) => (path, true),
        Some((path, "off")) => (path, false),
        Some((_, value)) => return Err(format!("readonly={value} is not valid: use on or off")),
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
