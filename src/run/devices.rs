// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `--disk PATH[,readonly=on]`, `--net tap=NAME[,mac=…]` and `--vsock cid=N`.

use granule_vmm::{
    devices::virtio::net::MacAddress,
    vm::attach::{DiskConfig, NetConfig, VsockConfig},
};

/// Reads a disk. A path may hold commas: what follows the last one is taken as an option only if
/// it is one.
///
/// # Errors
/// What is wrong with it, for people.
pub fn disk(text: &str) -> Result<DiskConfig, String> {
    let (path, read_only) = match text.rsplit_once(",readonly=") {
        Some((path, "on")) => (path, true),
        Some((path, "off")) => (path, false),
        Some((_, value)) => return Err(format!("readonly={value}: use on or off")),
        None => (text, false),
    };
    if path.is_empty() {
        return Err("the path is missing: write PATH[,readonly=on]".to_owned());
    }
    Ok(DiskConfig {
        path: path.into(),
        read_only,
    })
}

/// Reads a network card.
///
/// # Errors
/// What is wrong with it, for people.
pub fn net(text: &str) -> Result<NetConfig, String> {
    let (mut tap, mut mac) = (None, None);
    for part in text.split(',') {
        match part.split_once('=') {
            Some(("tap", name)) => tap = Some(name.to_owned()),
            Some(("mac", address)) => mac = Some(address_of(address)?),
            _ => {
                return Err(format!(
                    "'{part}' is not known: use tap=NAME or mac=ADDRESS"
                ));
            }
        }
    }
    let tap = tap.ok_or("the tap is missing: write tap=NAME")?;
    Ok(NetConfig { tap, mac })
}

/// Reads the guest's address for sockets between it and the host.
///
/// # Errors
/// What is wrong with it, for people.
pub fn vsock(text: &str) -> Result<VsockConfig, String> {
    let Some(number) = text.strip_prefix("cid=") else {
        return Err(format!("'{text}' is not known: use cid=N"));
    };
    /// The number above it stands for any machine.
    const LAST: u32 = u32::MAX - 1;
    match number.parse() {
        // Below are the hypervisor, the machine itself and the host.
        Ok(cid @ 3..=LAST) => Ok(VsockConfig { cid }),
        _ => Err(format!(
            "cid={number} can be no guest's: use a number from 3 to {LAST}"
        )),
    }
}

fn address_of(text: &str) -> Result<MacAddress, String> {
    let mut bytes = text.split(':').map(|part| match part.len() {
        2 => u8::from_str_radix(part, 16).ok(),
        _ => None,
    });
    let mut mac = MacAddress::default();
    let whole = mac.iter_mut().all(|place| match bytes.next().flatten() {
        Some(byte) => {
            *place = byte;
            true
        }
        None => false,
    });
    match whole && bytes.next().is_none() {
        true if mac[0] & 1 == 0 => Ok(mac),
        true => Err(format!(
            "mac={text} is a group's address: its first byte must be even"
        )),
        false => Err(format!("mac={text}: write six bytes as 02:00:00:00:00:01")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_are_written_to_unless_said() {
        let disk = |text| disk(text).map(|disk| (disk.path, disk.read_only));

        assert_eq!(disk("/d/a,b.img"), Ok(("/d/a,b.img".into(), false)));
        assert_eq!(disk("d.img,readonly=on"), Ok(("d.img".into(), true)));
        assert!(
            disk("d.img,readonly=yes")
                .unwrap_err()
                .contains("on or off")
        );
        assert!(disk(",readonly=on").unwrap_err().contains("missing"));
    }

    #[test]
    fn sockets_have_an_address_that_a_guest_can_have() {
        let last = vsock("cid=4294967294").map(|vsock| vsock.cid);

        assert_eq!(vsock("cid=3"), Ok(VsockConfig { cid: 3 }));
        assert_eq!(last, Ok(4_294_967_294));
        for (text, why) in [
            ("", "use cid=N"),
            ("42", "use cid=N"),
            ("cid=", "from 3 to 4294967294"),
            ("cid=2", "from 3 to 4294967294"),
            ("cid=4294967295", "from 3 to 4294967294"),
            ("cid=3,port=1", "from 3 to 4294967294"),
        ] {
            let error = vsock(text).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn cards_have_a_tap_and_perhaps_an_address() {
        let plain = net("tap=tap0").unwrap();
        let full = net("mac=02:00:0a:0b:0c:ff,tap=tap1").unwrap();

        assert_eq!((plain.tap.as_str(), plain.mac), ("tap0", None));
        assert_eq!(full.mac, Some([2, 0, 10, 11, 12, 255]));
        for (text, why) in [
            ("", "not known"),
            ("mac=02:00:00:00:00:01", "tap=NAME"),
            ("tap=t,mac=02:00:00:00:00", "six bytes"),
            ("tap=t,mac=02:00:00:00:00:01:02", "six bytes"),
            ("tap=t,mac=2:0:0:0:0:+1", "six bytes"),
            ("tap=t,mac=01:00:00:00:00:01", "even"),
            ("tap=t,queues=2", "not known"),
        ] {
            let error = net(text).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
