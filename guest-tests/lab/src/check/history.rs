// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Events in words.

use granule_stage2::check::{
    StoreKind,
    machine::{MachineAction, event::IcScope},
};

use super::setup::Setup;

/// Describes a step of a CPU as a predicate: `stores …`.
pub fn describe(action: &MachineAction, setup: &Setup) -> String {
    match action {
        MachineAction::Store { entry, old, new, kind } => {
            let verb = match kind {
                StoreKind::Plain => "stores",
                StoreKind::Release => "store-releases",
                StoreKind::Swap => "swaps in",
                StoreKind::RelaxedSwap => "swaps in without order",
            };
            let (old, new) = (describe_entry(*old), describe_entry(*new));
            format!("{verb} at {:#x}: {new}; before: {old}", entry.0)
        }
        MachineAction::Table { table, level, entries, .. } => {
            format!("links the level-{level} table {:#x} of {} entries", table.0, entries.len())
        }
        MachineAction::KernelTable { table, level, entries, .. } => {
            let entries = entries.len();
            format!("links the kernel's level-{level} table {:#x} of {entries} entries", table.0)
        }
        MachineAction::SetKernelRoot(level, root) => {
            format!("writes TTBR1 at EL{level}: root {:#x}", root.0)
        }
        MachineAction::SetKernelTcr(value) => format!("writes TCR = {value:#x}"),
        MachineAction::SetKernelMair(value) => format!("writes MAIR = {value:#x}"),
        MachineAction::KernelTlbi(name, operand) => {
            format!("TLBI {} of the kernel, operand {operand:#x}", name.to_uppercase())
        }
        MachineAction::SetVtcr(value) => format!("writes VTCR_EL2 = {value:#x}"),
        MachineAction::SetVttbr(value) => {
            let root = value & 0x0000_ffff_ffff_fffe;
            format!("writes VTTBR_EL2: VMID {}, root {root:#x}", value >> 48)
        }
        MachineAction::SetHcr(value) => format!("writes HCR_EL2 = {value:#x}"),
        MachineAction::Tlbi(name, operand) => {
            format!("TLBI {}, operand {operand:#x}", name.to_uppercase())
        }
        MachineAction::Dc(name, phys, size) => {
            format!("DC {} on {size:#x} bytes at {:#x}", name.to_uppercase(), phys.0)
        }
        MachineAction::Ic(IcScope::Range(phys, size)) => {
            format!("IC IVAU on {size:#x} bytes at {:#x}", phys.0)
        }
        MachineAction::HostWrite(page) => format!("writes the page {:#x} as the host", page.0),
        MachineAction::Word { word, old, new } => {
            format!("changes the lock at {:#x}: {old:#x} → {new:#x}", word.0)
        }
        MachineAction::Enter(number, [first, ..]) => {
            format!("calls {} with {first:#x}", function(setup, *number))
        }
        MachineAction::Leave(number, result) => {
            format!("returns from {}: {result:#x}", function(setup, *number))
        }
        MachineAction::Thread(0) => "executes no thread of the kernel".to_owned(),
        MachineAction::Thread(thread) => format!("executes the thread {thread:#x}"),
        MachineAction::Free(root) => format!("frees the tree of the root {:#x}", root.0),
        other => other.to_string().to_uppercase(),
    }
}

fn function(setup: &Setup, number: u16) -> String {
    setup.function(number).map_or_else(|| format!("function {number}"), str::to_owned)
}

/// Describes a stage-2 entry whose level is not known (Arm ARM D8.3).
pub fn describe_entry(entry: u64) -> String {
    // A table entry has no attributes in bits 11 to 2, a leaf has at least the access flag.
    describe_descriptor(entry, 0xffc, |bit| {
        let read = if bit(6) { "r" } else { "-" };
        let write = if bit(7) { "w" } else { "-" };
        let execute = if bit(54) { "-" } else { "x" };
        let access = if bit(10) { "" } else { ", access flag clear" };
        format!("{read}{write}{execute}{access}")
    })
}

/// Describes an entry of the kernel's own tables, whose level is not known (Arm ARM D8.3).
pub fn describe_stage1_entry(entry: u64) -> String {
    // A table entry has no attributes in bits 9 to 2; a page of Linux is shareable.
    describe_descriptor(entry, 0x3fc, |bit| {
        let write = if bit(7) { "-" } else { "w" };
        let execute = if bit(53) { "-" } else { "x" };
        let contiguous = if bit(52) { ", contiguous" } else { "" };
        format!("r{write}{execute}{contiguous}")
    })
}

/// Describes an entry. `attribute_bits` are bits of which every page has one and no table has any;
/// `attributes` formats those of a leaf.
fn describe_descriptor(
    entry: u64,
    attribute_bits: u64,
    attributes: impl Fn(&dyn Fn(u32) -> bool) -> String,
) -> String {
    const ADDRESS: u64 = 0x0000_ffff_ffff_f000;
    let bit = |at: u32| entry >> at & 1 == 1;
    let phys = entry & ADDRESS;
    if entry == 0 {
        return "empty".to_owned();
    }
    if !bit(0) {
        return format!("invalid ({entry:#x})");
    }
    if bit(1) && entry & attribute_bits == 0 {
        return format!("table {phys:#x}");
    }
    let kind = if bit(1) { "page" } else { "block" };
    format!("{kind} → {phys:#x} {} ({entry:#x})", attributes(&bit))
}

#[cfg(test)]
mod tests {
    use granule_stage2::check::machine::MachineEvent;

    use super::{super::setup::tests::setup, *};

    #[test]
    fn events_are_described_in_words() {
        let setup = setup();
        for (line, expected) in [
            (
                "0 store 41181010 0 40000041a007fd release",
                "store-releases at 0x41181010: block → 0x41a00000 rw- (0x40000041a007fd); before: \
                 empty",
            ),
            (
                "0 store 41184000 41185003 400000041a0077f swap",
                "swaps in at 0x41184000: page → 0x41a00000 r-x (0x400000041a0077f); before: \
                 table 0x41185000",
            ),
            ("1 vttbr 1000041180000", "writes VTTBR_EL2: VMID 1, root 0x41180000"),
            ("0 tlbi ipas2e1is 41a00", "TLBI IPAS2E1IS, operand 0x41a00"),
            ("0 dsb ishst", "DSB ISHST"),
            ("0 enter 2 1000 0 0 0", "calls kvm_init_stage2_mmu with 0x1000"),
            ("0 thread ffff000003f68e80", "executes the thread 0xffff000003f68e80"),
            ("0 leave 9 0", "returns from function 9: 0x0"),
            ("0 ic ialluis", "IC IALLUIS"),
        ] {
            let event: MachineEvent = line.parse().unwrap();

            assert_eq!(describe(&event.action, &setup), expected);
        }
    }
}
