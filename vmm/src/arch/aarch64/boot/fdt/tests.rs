// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
use proptest::prelude::*;

use super::*;
use crate::devices::{Rtc, Serial};

/// Converts a device tree blob to text, in file order (Devicetree Specification 0.4, chapter 5).
fn fdt_to_text(bytes: &[u8]) -> String {
    let word = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
    let name_at = |at: usize| {
        let end = bytes[at..].iter().position(|byte| *byte == 0).unwrap();
        std::str::from_utf8(&bytes[at..at + end]).unwrap()
    };
    let (mut at, strings) = (word(8), word(12));
    let (mut depth, mut out) = (0, String::new());
    loop {
        let indent = "  ".repeat(depth);
        match word(at) {
            1 => {
                let name = name_at(at + 4);
                out += &format!("{indent}{name}/\n");
                depth += 1;
                at = (at + 4 + name.len() + 1).next_multiple_of(4);
            }
            2 => {
                depth -= 1;
                at += 4;
            }
            3 => {
                let (size, name) = (word(at + 4), name_at(strings + word(at + 8)));
                let value = &bytes[at + 12..at + 12 + size];
                out += &format!("{indent}{name}{}\n", value_text(name, value));
                at = (at + 12 + size).next_multiple_of(4);
            }
            9 => return out,
            token => panic!("token {token}"),
        }
    }
}

fn value_text(name: &str, value: &[u8]) -> String {
    let strings = ["compatible", "model", "method", "bootargs", "device_type", "stdout-path"];
    if value.is_empty() {
        String::new()
    } else if strings.contains(&name) || name.ends_with("names") || name == "enable-method" {
        let text = std::str::from_utf8(value).unwrap().trim_end_matches('\0');
        format!(" = {}", text.replace('\0', ", "))
    } else {
        let cells = value
            .chunks(4)
            .map(|cell| format!("{:x}", u32::from_be_bytes(cell.try_into().unwrap())));
        format!(" = <{}>", cells.collect::<Vec<_>>().join(" "))
    }
}

fn devices() -> Vec<MmioDeviceInfo> {
    let start = GuestAddress(0xa00_0000);
    let virtio = MmioDeviceInfo::new("disk0", start, Some(1), &["virtio,mmio"]);
    vec![
        Serial::describe(GuestAddress(0x900_0000), 0),
        Rtc::describe(GuestAddress(0x901_0000)),
        virtio,
    ]
}

const MEMORY_RANGES: &[(GuestAddress, Bytes)] = &[(GuestAddress(0x4000_0000), Bytes::mib(512))];

/// Returns a device tree without devices, PMU, initramfs or entropy.
fn minimal_fdt<'a>(cpus: &'a [u64], command_line: &'a str) -> Fdt<'a> {
    Fdt {
        memory: MEMORY_RANGES,
        affinities: cpus,
        has_pmu: false,
        gic: Gic::V3 { has_its: true },
        devices: &[],
        command_line,
        initrd: None,
        seed: None,
    }
}

#[test]
fn the_fdt_matches_the_golden_file() {
    let fdt = Fdt {
        memory: &[MEMORY_RANGES[0], (GuestAddress(0x6000_0000), Bytes::gib(16))],
        has_pmu: true,
        devices: &devices(),
        initrd: Some(GuestAddress(0x4420_0000)..GuestAddress(0x4430_0001)),
        seed: Some(&[7; 40]),
        ..minimal_fdt(&[0, 1], "console=ttyS0 quiet")
    };

    let text = fdt_to_text(&fdt.write().unwrap());

    // After an intended change, run the test with GRANULE_BLESS=1 and review the difference.
    if std::env::var_os("GRANULE_BLESS").is_some() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/arch/aarch64/boot/golden/fdt.txt");
        std::fs::write(path, &text).unwrap();
    }
    assert_eq!(text, include_str!("../golden/fdt.txt"));
}

#[test]
fn gicv2_private_interrupts_have_a_cpu_mask() {
    let fdt = Fdt { gic: Gic::V2, ..minimal_fdt(&[0, 1, 2], "") };

    let text = fdt_to_text(&fdt.write().unwrap());

    assert!(text.contains("compatible = arm,cortex-a15-gic"), "{text}");
    assert!(text.contains("interrupts = <1 d 704 1 e 704 1 b 704 1 a 704>"), "{text}");
    assert!(!text.contains("pmu"));
}

#[test]
fn a_command_line_with_a_nul_is_refused() {
    assert!(minimal_fdt(&[0], "a\0b").write().is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn each_memory_zone_cpu_and_device_has_a_node(
        zones in prop::collection::btree_map(any::<u64>(), any::<u64>(), 0..9),
        starts in prop::collection::btree_set(any::<u64>(), 0..13),
        cpus in 0..601_u64,
        command_line in "[ -~]{0,200}",
    ) {
        let memory: Vec<_> = zones.iter().map(|(&s, &l)| (GuestAddress(s), Bytes(l))).collect();
        let disk = |start| MmioDeviceInfo::new("disk", start, Some(1), &["virtio,mmio"]);
        let devices: Vec<_> = starts.iter().map(|&start| disk(GuestAddress(start))).collect();
        let cpus: Vec<u64> = (0..cpus).collect();
        let fdt = Fdt { memory: &memory, devices: &devices, ..minimal_fdt(&cpus, &command_line) };

        let text = fdt_to_text(&fdt.write().unwrap());

        let line = format!("bootargs = {command_line}\n");
        prop_assert!(text.contains(&line), "{text}");
        prop_assert_eq!(text.matches("device_type = cpu").count(), cpus.len());
        let zones = zones.iter().map(|(s, size)| ("memory", "device_type = memory", s, size));
        let devices = starts.iter().map(|s| ("disk", "compatible = virtio,mmio", s, &0x1000));
        for (name, property, start, size) in zones.chain(devices) {
            let cells = [start >> 32, start & 0xffff_ffff, size >> 32, size & 0xffff_ffff];
            let cells = cells.map(|cell| format!("{cell:x}")).join(" ");
            let node = format!("  {name}@{start:x}/\n    {property}\n    reg = <{cells}>\n");
            prop_assert!(text.contains(&node), "{node}");
        }
    }
}
