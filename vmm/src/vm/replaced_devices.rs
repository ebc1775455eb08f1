// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Devices that the command line of a restore names, in place of those of the snapshot.
//!
//! The guest has drivers for the devices that it had, so each one is replaced by one of its kind: the
//! number of disks stays, and who may write to them, and a network card keeps its address.

use super::{
    config::{ReplacedDevices, VirtioConfig},
    outcome::VmError,
};
use crate::devices::virtio::net::mac_from_tap_name;

impl ReplacedDevices {
    /// Replaces devices of the snapshot with this name.
    ///
    /// # Errors
    /// A device is not of the kind that the guest has.
    pub fn replace(&self, snapshot: &str, saved: &mut VirtioConfig) -> Result<(), VmError> {
        let refused = |text: String| Err(VmError::Refused(format!("{snapshot}: {text}")));
        let all = |option: &str, given: usize, needed: usize| match given {
            0 => Ok(()),
            _ if given == needed => Ok(()),
            _ => refused(format!(
                "the guest has {needed} devices of {option}, and the command line {given}: name \
                 none or all of them"
            )),
        };
        all("--disk", self.disks.len(), saved.disks.len())?;
        all("--net", self.nets.len(), saved.nets.len())?;
        for (number, (new, saved)) in (1..).zip(self.disks.iter().zip(&mut saved.disks)) {
            if new.is_read_only != saved.is_read_only {
                let switch = if saved.is_read_only { "on" } else { "off" };
                return refused(format!("the guest has disk {number} with readonly={switch}"));
            }
            saved.path.clone_from(&new.path);
        }
        for (number, (new, saved)) in (1..).zip(self.nets.iter().zip(&mut saved.nets)) {
            let mac = *saved.mac.get_or_insert_with(|| mac_from_tap_name(&saved.tap));
            if new.mac.is_some_and(|new| new != mac) {
                return refused(format!("the guest has network card {number} with another mac"));
            }
            saved.tap.clone_from(&new.tap);
        }
        match (self.vsock, &mut saved.vsock) {
            (Some(new), Some(saved)) => *saved = new,
            (Some(_), None) => return refused("the guest has no --vsock".to_owned()),
            (None, _) => {}
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm::config::{DiskConfig, NetConfig, VsockConfig};

    fn disk(path: &str, is_read_only: bool) -> DiskConfig {
        DiskConfig { path: path.into(), is_read_only }
    }

    fn net(tap: &str, mac: Option<[u8; 6]>) -> NetConfig {
        NetConfig { tap: tap.to_owned(), mac }
    }

    fn saved_devices() -> VirtioConfig {
        VirtioConfig {
            disks: vec![disk("/a", false), disk("/b", true)],
            nets: vec![net("tap0", None)],
            ..VirtioConfig::default()
        }
    }

    #[test]
    fn devices_that_are_not_named_stay() {
        let mut devices = saved_devices();

        ReplacedDevices::default().replace("saved", &mut devices).unwrap();

        assert_eq!(devices, saved_devices());
    }

    #[test]
    fn a_replaced_card_keeps_its_address() {
        let replaced = ReplacedDevices {
            disks: vec![disk("/c", false), disk("/d", true)],
            nets: vec![net("tap7", None)],
            vsock: None,
        };
        let mut devices = saved_devices();

        replaced.replace("saved", &mut devices).unwrap();

        assert_eq!(devices.disks, replaced.disks);
        assert_eq!(devices.nets, vec![net("tap7", Some(mac_from_tap_name("tap0")))]);
    }

    #[test]
    fn a_device_of_another_kind_is_refused() {
        let disks = |disks| ReplacedDevices { disks, ..ReplacedDevices::default() };
        let nets = |nets| ReplacedDevices { nets, ..ReplacedDevices::default() };
        let vsock = Some(VsockConfig { cid: 3 });
        for (replaced, why) in [
            (disks(vec![disk("/c", false)]), "2 devices of --disk, and the command line 1"),
            (disks(vec![disk("/c", false), disk("/d", false)]), "disk 2 with readonly=on"),
            (disks(vec![disk("/c", true), disk("/d", true)]), "disk 1 with readonly=off"),
            (nets(vec![net("a", None), net("b", None)]), "1 devices of --net"),
            (nets(vec![net("a", Some([2, 0, 0, 0, 0, 1]))]), "card 1 with another mac"),
            (ReplacedDevices { vsock, ..ReplacedDevices::default() }, "no --vsock"),
        ] {
            let error = replaced.replace("saved", &mut saved_devices()).unwrap_err().to_string();

            assert!(error.contains(why), "{why}: {error}");
        }
    }
}
