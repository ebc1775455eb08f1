// SPDX-License-Identifier: GPL-2.0-or-later
//! Whole traces of a machine whose instructions the tests execute.

use std::{
    io::{self, Write},
    sync::{Arc, Mutex},
};

use granule_stage2::{
    PhysAddr,
    check::{StoreKind, machine::event::MachineEvent},
};

use super::{
    arguments::TraceArguments,
    machine::fake::{FakeMachine, LINEAR, MEMORY},
    observer::{Observer, Store},
};

const VTTBR_X0: u32 = 0xd51c_2100;
const VTCR_X0: u32 = 0xd51c_2140;
const HCR_X0: u32 = 0xd51c_1100;
const DSB_ISH: u32 = 0xd503_3b9f;
const DMB_ISH: u32 = 0xd503_3bbf;
const DMB_ISHLD: u32 = 0xd503_39bf;
const ISB: u32 = 0xd503_3fdf;
const TLBI_IPAS2E1IS_X0: u32 = 0xd50c_8020;
const TLBI_VAE2IS_X0: u32 = 0xd50c_8320;
const TLBI_VAALE1IS_X0: u32 = 0xd508_83e0;
const TTBR1_X0: u32 = 0xd518_2020;
const TCR_X0: u32 = 0xd518_2040;
const DC_CIVAC_X0: u32 = 0xd50b_7e20;
const DC_ZVA_X0: u32 = 0xd50b_7420;
const NOP: u32 = 0xd503_201f;
const RET: u32 = 0xd65f_03c0;
const SETP_X0_X1: u32 = 0x19c2_0420;

/// VTCR_EL2 with 39 address bits and 4K pages: one root table of level 1.
const VTCR: u64 = 0x8002_3559;
const ROOT: u64 = MEMORY + 0x1000;
const TABLE: u64 = MEMORY + 0x2000;
const HCR_GUEST: u64 = 1;
/// The host at EL2 with VHE: E2H and TGE.
const HCR_HOST: u64 = 1 << 34 | 1 << 27;
/// TCR_EL1 with 39 upper address bits in 4K pages: the root has level 1.
const TCR: u64 = 2 << 30 | 25 << 16;
const VMID: u64 = 1 << 48;
/// Address of a task of the kernel.
const TASK: u64 = 0xffff_0000_0000_8000;

/// Output that the test reads.
#[derive(Debug, Clone, Default)]
struct Output(Arc<Mutex<Vec<u8>>>);

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A machine of two CPUs and its observer.
struct Bench {
    machine: FakeMachine,
    observer: Observer,
    output: Output,
}

impl Bench {
    fn new(arguments: &[(&str, &str)]) -> Self {
        let mut parsed = TraceArguments { omits_stacks: true, ..TraceArguments::default() };
        for (key, value) in arguments {
            parsed.set(key, value).unwrap();
        }
        let (machine, output) = (FakeMachine::new(16), Output::default());
        let (boxed, out) = (Box::new(machine.clone()), Box::new(output.clone()));
        Self { machine, observer: Observer::new(boxed, 2, parsed, out), output }
    }

    /// Executes an instruction with a value in `X0`.
    fn execute(&self, cpu: u8, word: u32, x0: u64) {
        self.machine.set_register(0, x0);
        self.call(cpu, 0x1000, word);
    }

    /// Executes the instruction at an address.
    fn call(&self, cpu: u8, address: u64, word: u32) {
        for number in self.observer.callbacks(address, word) {
            self.observer.execute(cpu, number);
        }
    }

    /// Stores eight bytes.
    fn store(&self, cpu: u8, phys: u64, value: u64, kind: StoreKind) {
        self.machine.write(phys, value);
        let store = Store { cpu, address: 0x2000, kind, is_at_el2: false };
        self.observer.store(store, PhysAddr(phys), || 8);
    }

    fn set_root(&self, cpu: u8) {
        self.execute(cpu, VTCR_X0, VTCR);
        self.execute(cpu, VTTBR_X0, VMID | ROOT);
    }

    /// Ends the trace and returns its lines, which are events or comments, without identification
    /// registers.
    fn finish(&self) -> Vec<String> {
        self.observer.finish().unwrap();
        let text = String::from_utf8(self.output.0.lock().unwrap().clone()).unwrap();
        let mut lines = text.lines().map(str::to_owned);
        assert_eq!(lines.next().unwrap(), "granule-machine-trace 1");
        let lines: Vec<_> = lines.filter(|line| !line.contains(" id ")).collect();
        for line in lines.iter().filter(|line| !line.starts_with('#')) {
            assert_eq!(line.parse::<MachineEvent>().unwrap().to_string(), *line);
        }
        lines
    }
}

#[test]
fn a_table_is_reported_before_the_store_that_links_it_with_its_unordered_writer() {
    let bench = Bench::new(&[]);
    bench.set_root(0);
    bench.store(1, TABLE + 8, 0x4000_07fd, StoreKind::Plain);
    bench.execute(1, DMB_ISHLD, 0);
    bench.store(0, ROOT, TABLE | 3, StoreKind::Release);
    bench.store(0, ROOT, TABLE | 3, StoreKind::Swap);
    bench.store(0, ROOT, 0, StoreKind::Plain);
    bench.execute(1, DMB_ISH, 0);
    bench.store(1, ROOT, TABLE | 3, StoreKind::Swap);

    let lines = bench.finish();

    assert_eq!(
        lines,
        [
            "0 vtcr 80023559",
            "0 table 40001000 1 -",
            "0 vttbr 1000040001000",
            "1 write 40002000",
            "1 dmb ishld",
            "0 table 40002000 2 1 1=400007fd",
            "0 store 40001000 0 40002003 release",
            "0 store 40001000 40002003 0 plain",
            "1 dmb ish",
            "1 table 40002000 2 - 1=400007fd",
            "1 store 40001000 0 40002003 swap",
            "# end events=14 skipped=",
        ]
    );
}

#[test]
fn identification_registers_are_written_once() {
    let bench = Bench::new(&[]);
    bench.execute(0, DSB_ISH, 0);
    bench.set_root(0);
    bench.set_root(1);

    bench.finish();

    let text = String::from_utf8(bench.output.0.lock().unwrap().clone()).unwrap();
    let lines: Vec<_> = text.lines().skip(2).take(4).collect();
    let expected =
        ["0 id ctr_el0 8444c004", "0 id id_aa64isar0_el1 10", "0 id id_aa64mmfr2_el1 10"];
    assert_eq!((&lines[..3], lines[3]), (&expected[..], "0 vtcr 80023559"));
    assert_eq!(text.matches(" id ").count(), 3);
}

#[test]
fn a_guest_is_not_observed_but_the_host_at_el2_is() {
    let bench = Bench::new(&[]);
    bench.set_root(0);
    bench.execute(0, HCR_X0, HCR_GUEST);
    let el = |level| bench.machine.0.lock().unwrap().exception_level = level;

    el(1);
    bench.execute(0, DSB_ISH, 0);
    bench.execute(0, HCR_X0, 0);
    bench.store(0, TABLE, 1, StoreKind::Plain);
    bench.store(1, TABLE + 4096, 1, StoreKind::Plain);
    assert!(!bench.observer.is_at_el2());
    el(2);
    assert!(bench.observer.is_at_el2());
    bench.machine.write(ROOT, 1);
    let store = Store { cpu: 0, address: 0x2000, kind: StoreKind::Plain, is_at_el2: true };
    bench.observer.store(store, PhysAddr(ROOT), || 8);
    bench.execute(0, ISB, 0);
    bench.execute(0, HCR_X0, 0);
    bench.store(0, TABLE, 1, StoreKind::Plain);

    let expected = [
        "0 hcr 1",
        "1 write 40003000",
        "0 store 40001000 0 1 plain",
        "0 isb",
        "0 hcr 0",
        "0 write 40002000",
    ];
    assert_eq!(bench.finish()[3..9], expected);
}

#[test]
fn a_page_is_written_again_after_cache_maintenance() {
    let bench = Bench::new(&[]);
    let page = LINEAR + TABLE;
    bench.store(0, TABLE, 1, StoreKind::Plain);
    bench.store(1, TABLE + 8, 1, StoreKind::Plain);
    for line in 0..4 {
        bench.execute(1, DC_CIVAC_X0, page + line * 64);
    }
    bench.execute(1, DSB_ISH, 0);
    bench.execute(1, DC_ZVA_X0, page);
    bench.machine.set_register(1, 0x1800);
    bench.execute(0, SETP_X0_X1, page);
    bench.execute(0, DC_CIVAC_X0, 0x1000);

    assert_eq!(
        bench.finish(),
        [
            "0 write 40002000",
            "1 dc civac 40002000 100",
            "1 dsb ish",
            "1 write 40002000",
            "0 write 40003000",
            "# end events=5 skipped=untranslated-line:1",
        ]
    );
}

#[test]
fn invalidations_of_stage_2_are_reported_with_their_operand() {
    let bench = Bench::new(&[]);
    bench.execute(0, TLBI_IPAS2E1IS_X0, 0x4_1a00);
    bench.execute(0, TLBI_VAE2IS_X0, 1);

    let end = "# end events=1 skipped=tlbi-vae2is:1";
    assert_eq!(bench.finish(), ["0 tlbi ipas2e1is 41a00", end]);
}

#[test]
fn the_tables_of_the_running_kernel_are_reported_until_their_pages_are_written_again() {
    let bench = Bench::new(&[("stage1", "on")]);
    bench.execute(0, TTBR1_X0, ROOT);
    bench.execute(0, HCR_X0, HCR_HOST);
    bench.execute(0, TCR_X0, TCR);
    bench.store(0, ROOT, TABLE | 3, StoreKind::Plain);
    bench.execute(0, TTBR1_X0, 7 << 48 | ROOT);
    bench.execute(0, TTBR1_X0, 8 << 48 | ROOT);
    bench.execute(0, TLBI_VAALE1IS_X0, 0x0ff8_0001_0010);
    bench.execute(0, TLBI_VAALE1IS_X0, 0x0aaa_0001_0010 & !(1 << 43));
    bench.store(0, TABLE + 8, 0x4000_0701, StoreKind::Release);
    bench.store(0, ROOT, 0, StoreKind::Plain);
    bench.store(0, TABLE, 1, StoreKind::Plain);

    assert_eq!(
        bench.finish(),
        [
            "0 hcr 408000000",
            "0 ktcr 80190000",
            "0 write 40001000",
            "0 ktable 40002000 2 -",
            "0 ktable 40001000 1 0 0=40002003",
            "0 kroot 2 40001000",
            "0 ktlbi vaale1is ff800010010",
            "0 store 40002008 0 40000701 release",
            "0 store 40001000 40002003 0 plain",
            "0 write 40002000",
            "# end events=13 skipped=tlbi-vaale1is:2",
        ]
    );
}

#[test]
fn a_barrier_of_the_only_cpu_for_itself_orders_its_stores_to_the_kernels_tables() {
    const DSB_NSHST: u32 = 0xd503_369f;
    for (is_alone, writer) in [(true, "-"), (false, "0")] {
        let bench = Bench::new(&[("stage1", "on")]);
        for cpu in [0, 1] {
            bench.execute(cpu, HCR_X0, HCR_HOST);
            bench.execute(cpu, TCR_X0, TCR);
        }
        bench.execute(0, TTBR1_X0, ROOT);
        if !is_alone {
            bench.execute(1, TTBR1_X0, ROOT);
        }
        bench.store(0, TABLE, 1, StoreKind::Plain);
        bench.execute(0, DSB_NSHST, 0);
        bench.store(0, ROOT, TABLE | 3, StoreKind::Plain);

        let expected = format!("0 ktable 40002000 2 {writer} 0=1");
        assert!(bench.finish().contains(&expected), "{expected}");
    }
}

#[test]
fn a_root_is_reported_when_its_registers_are_complete() {
    let (vttbr, vtcr, hcr) = ((VTTBR_X0, VMID | ROOT), (VTCR_X0, VTCR), (HCR_X0, 1));
    let table = "0 table 40001000 1 -";
    for (writes, lines) in [
        ([vttbr, vtcr, hcr], ["0 vttbr 1000040001000", "0 vtcr 80023559", table, "0 hcr 1"]),
        ([vttbr, hcr, vtcr], ["0 vttbr 1000040001000", "0 hcr 1", "0 vtcr 80023559", table]),
    ] {
        let bench = Bench::new(&[]);
        for (instruction, value) in writes {
            bench.execute(0, instruction, value);
        }

        assert_eq!(bench.finish()[..4], lines);
    }
}

#[test]
fn a_hypervisor_without_vhe_restores_the_tables_of_others() {
    let bench = Bench::new(&[("stage1", "on")]);
    bench.execute(0, TCR_X0, TCR);
    bench.execute(0, TTBR1_X0, ROOT);
    bench.execute(0, TLBI_VAALE1IS_X0, 0x0ff8_0001_0010);

    assert_eq!(bench.finish(), ["# end events=0 skipped=tlbi-vaale1is:1"]);
}

#[test]
fn zeroing_a_table_by_dc_zva_changes_its_entries() {
    let bench = Bench::new(&[("verify", "on")]);
    bench.machine.write(ROOT + 16, 0x40_07fd);
    bench.set_root(0);
    bench.execute(1, DC_ZVA_X0, LINEAR + ROOT + 8);
    bench.machine.write(ROOT + 16, 0);

    assert_eq!(
        bench.finish()[1..],
        [
            "0 table 40001000 1 - 2=4007fd",
            "0 vttbr 1000040001000",
            "1 store 40001010 4007fd 0 plain",
            "# verify tables=1 different=0",
            "# end events=7 skipped=",
        ]
    );
}

#[test]
fn calls_locks_and_freed_trees_are_reported() {
    let arguments = [("function", "7:3000:3100"), ("lock", "7:c"), ("free", "4000:8")];
    let bench = Bench::new(&arguments);
    bench.set_root(0);
    let object = LINEAR + TABLE;
    bench.machine.set_register(0, object);
    bench.machine.set_register(3, 9);

    bench.call(0, 0x3000, NOP);
    bench.store(0, TABLE + 8, 1 << 32, StoreKind::Swap);
    bench.call(0, 0x30fc, RET);
    bench.store(0, TABLE + 8, LINEAR + ROOT, StoreKind::Plain);
    bench.machine.set_register(0, object);
    bench.call(1, 0x4000, NOP);
    bench.call(1, 0x4000, NOP);
    bench.store(0, ROOT, 3, StoreKind::Plain);

    assert_eq!(
        bench.finish()[3..],
        [
            "0 enter 7 ffff000040002000 0 0 9",
            "0 write 40002000",
            "0 word 4000200c 0 1",
            "0 leave 7 ffff000040002000",
            "0 word 4000200c 1 ffff0000",
            "1 free 40001000",
            "0 write 40001000",
            "# end events=13 skipped=",
        ]
    );
}

#[test]
fn addresses_of_a_function_are_physical_and_other_values_stay() {
    let bench =
        Bench::new(&[("function", "7:3000:3100"), ("physical", "7"), ("function", "8:3000:3000")]);
    for x0 in [LINEAR + TABLE, 0x2000] {
        bench.machine.set_register(0, x0);
        bench.call(0, 0x3000, NOP);
        bench.call(0, 0x30fc, RET);
    }

    let lines = bench.finish();

    assert_eq!(
        lines[..lines.len() - 1],
        [
            "0 enter 7 40002000 0 0 0",
            "0 enter 8 ffff000040002000 0 0 0",
            "0 leave 7 40002000",
            "0 enter 7 2000 0 0 0",
            "0 enter 8 2000 0 0 0",
            "0 leave 7 2000",
        ]
    );
}

#[test]
fn arguments_are_words_of_an_object_if_it_is_mapped() {
    let loads = [("load", "7:0:1:8"), ("load", "7:1:1:10")];
    let bench = Bench::new(&[&[("function", "7:3000:3000")][..], &loads].concat());
    bench.machine.write(TABLE + 8, 5);
    bench.machine.write(TABLE + 16, 6);
    for pointer in [LINEAR + TABLE, 0] {
        bench.machine.set_register(1, pointer);
        bench.call(0, 0x3000, NOP);
    }

    assert_eq!(bench.finish()[..2], ["0 enter 7 5 6 0 0", "0 enter 7 0 0 0 0"]);
}

#[test]
fn calls_stores_to_tables_and_cache_operations_have_the_thread_of_the_kernel() {
    let bench = Bench::new(&[("threads", "on"), ("function", "7:3000:3100")]);
    bench.set_root(0);
    let thread = |pointer| bench.machine.0.lock().unwrap().thread_pointer = pointer;
    thread(TASK);
    bench.call(0, 0x3000, NOP);
    bench.store(0, ROOT, 1, StoreKind::Plain);
    thread(TASK + 8);
    bench.store(0, ROOT, 1, StoreKind::Plain);
    bench.store(0, ROOT, 2, StoreKind::Plain);
    bench.call(0, 0x30fc, RET);
    thread(TASK);
    bench.call(1, 0x30fc, RET);
    bench.execute(0, DC_CIVAC_X0, LINEAR + TABLE);
    thread(0x7f00_0000);
    bench.execute(0, DC_CIVAC_X0, LINEAR + TABLE + 64);
    bench.execute(0, DC_CIVAC_X0, LINEAR + TABLE);

    assert_eq!(
        bench.finish()[3..],
        [
            "0 thread ffff000000008000",
            "0 enter 7 1000040001000 0 0 0",
            "0 store 40001000 0 1 plain",
            "0 thread ffff000000008008",
            "0 store 40001000 1 2 plain",
            "0 leave 7 1000040001000",
            "1 thread ffff000000008000",
            "1 leave 7 1000040001000",
            "0 thread ffff000000008000",
            "0 dc civac 40002000 80",
            "0 thread 0",
            "0 dc civac 40002000 40",
            "# end events=18 skipped=",
        ]
    );
}
