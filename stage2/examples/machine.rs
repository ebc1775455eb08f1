// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Checks a machine trace: `machine FILE CPUS`.

#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs)]
use std::{
    collections::{BTreeMap, BTreeSet},
    env,
    fs::File,
    io::{BufRead, BufReader},
};

use granule_stage2::{
    Features, PhysAddr,
    check::machine::{Hypervisor, LockType, Machine, MachineEvent, Observer, Role, event::HEADER},
};

fn main() {
    let mut arguments = env::args().skip(1);
    let file = arguments.next().unwrap();
    let cpus = arguments.next().unwrap().parse().unwrap();
    let lock = match arguments.next().as_deref() {
        Some("rw") => LockType::ReaderWriter,
        _ => LockType::Spinlock,
    };
    let locked: Option<(u64, u64)> = match arguments.next().as_deref() {
        Some("7") => Some((0xf << 60 | 1, 1 << 60)),
        Some("6") => Some((u64::MAX, 1 << 10)),
        _ => None,
    };
    let functions = BTreeMap::from([(2, Role::Call)]);
    let mut observer = Observer::new(Machine {
        cpus,
        features: Features { fwb: false, dic: false, tlb_range: false, bbm: 0 },
        memory: (PhysAddr(0x4000_0000), 2 << 30),
        hypervisor: Hypervisor { lock, locked_entry: locked, functions },
        disabled_rules: BTreeSet::from([granule_stage2::check::Rule::OutsideSlot]),
    });
    for line in BufReader::new(File::open(file).unwrap()).lines() {
        let line = line.unwrap();
        let line = line.split('#').next().unwrap().trim();
        if line.is_empty() || line == HEADER {
            continue;
        }
        match line.parse::<MachineEvent>() {
            Ok(event) => observer.observe(&event),
            Err(error) => println!("{line}: {error}"),
        }
    }
    println!("{:?}", observer.totals());
    for finding in observer.findings() {
        println!(
            "{} × {}: event {} CPU {} guest {:x?}: {}",
            finding.count, finding.rule, finding.event, finding.cpu, finding.guest, finding.detail
        );
        println!("   stack {:x?}", finding.stack);
        for (index, event) in &finding.history {
            println!("   {index}: {event}");
        }
    }
}
