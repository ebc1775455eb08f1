// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Target of snapshot files: the state of a VM and those of its devices, behind their checksum. A
//! device that accepts a state returns the same one when it is suspended.

use std::io;

use granule_types::units::{Bytes, GuestAddress};
use granule_vmm::{
    devices::{
        DeviceState, MmioDevice, Pl011, Rtc, Serial,
        virtio::{Transport, rng::Rng},
    },
    memory::{BackingPlan, GuestMemory, GuestRam, HostPages, RamOptions},
    vm::snapshot::VmState,
};
use vmm_sys_util::eventfd::EventFd;

pub fn run(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let _ = VmState::parse(text);
    if let Ok(state) = serde_json::from_str::<VmState>(text) {
        let written = state.to_text().expect("a state is JSON");
        assert_eq!(VmState::parse(&written).expect("a written state"), state);
    }
    let Ok(state) = serde_json::from_str::<DeviceState>(text) else { return };
    let mut devices: [Box<dyn MmioDevice>; 4] = [
        Box::new(Serial::new(event(), Box::new(io::sink())).expect("an eventfd")),
        Box::new(Pl011::new(event(), Box::new(io::sink())).expect("an eventfd")),
        Box::new(Rtc::default()),
        Box::new(entropy()),
    ];
    let accepted = devices.iter_mut().filter_map(|device| {
        device.restore(&state).ok()?;
        Some(device.suspend().expect("a device without a worker"))
    });
    let accepted: Vec<_> = accepted.collect();
    assert!(accepted.len() <= 1);
    for restored in accepted {
        assert_eq!(restored.as_ref(), Some(&state));
    }
}

fn entropy() -> Transport {
    let host = HostPages::of_this_host().expect("this host's pages");
    let plan = BackingPlan::new("anonymous".parse().expect("a backing"), &host).expect("a plan");
    let (start, size) = (GuestAddress(0x4000_0000), Bytes::mib(1));
    let ram = GuestRam::new(plan, &host, start, size, RamOptions::default()).expect("memory");
    let memory = GuestMemory::new(vec![ram]).expect("memory");
    Transport::new("entropy", Box::new(Rng), memory.into(), event()).expect("an eventfd")
}

fn event() -> EventFd {
    EventFd::new(0).expect("an eventfd")
}
