// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The published figures of a Kunpeng 920 beside the simulated ones.
//!
//! ```text
//! kunpeng920 table [DIVISOR]   the table of docs/simulation.md; exit code 1 if a row is not as told
//! kunpeng920 fit [DIVISOR]     the fitted numbers, from those in the table of costs
//! ```
//!
//! With a divisor the memory is that many times smaller and the seconds that many times more. The
//! whole, `table 1`, takes some minutes of two CPUs; `fit` uses 320 if it is not told.

use std::{error::Error, process::ExitCode};

use granule_pgtable_test::software_machine::simulate::{
    cost::{self, CostTable},
    published::{FITS, Judged, gain, judge},
};

const CPU: &str = "kunpeng920";
/// What is fitted has influence on what was fitted before.
const SWEEPS: usize = 3;

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut costs = CostTable::parse(CPU, &cost::text_of(CPU)?)?;
    let divisor = |default| match arguments.get(1) {
        Some(text) => text.parse(),
        None => Ok(default),
    };
    match arguments.first().map(String::as_str) {
        Some("fit") => {
            fit(&mut costs, divisor(320)?)?;
            Ok(ExitCode::SUCCESS)
        }
        Some("table") => table(&costs, divisor(1)?),
        _ => Err("use: kunpeng920 table [DIVISOR], or kunpeng920 fit [DIVISOR]".into()),
    }
}

fn fit(costs: &mut CostTable, divisor: u64) -> Result<(), Box<dyn Error>> {
    for sweep in 0..SWEEPS {
        for fit in &FITS {
            let best = fit.improve(costs, divisor)?;
            println!("sweep {sweep}: {} = {best}", fit.number);
        }
    }
    for fit in &FITS {
        let (wanted, found) = fit.measure(costs, divisor)?;
        println!(
            "{}: published {wanted:.3}, simulated {found:.3}",
            fit.number
        );
    }
    Ok(())
}

fn table(costs: &CostTable, divisor: u64) -> Result<ExitCode, Box<dyn Error>> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let rows = judge(costs, divisor, threads, &|load, kernel, seconds| {
        eprintln!("{load}, {}: {seconds:?}", kernel.name());
    })?;
    println!(
        "| change | source, size, vCPUs | phase | published s | gain | simulated s | gain | off | |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    for judged in &rows {
        let Judged { row, simulated } = judged;
        let verdict = match (row.fitted, judged.holds()) {
            (true, true) => "fitted",
            (false, true) => "holds",
            (_, false) => "**misses**",
        };
        println!(
            "| {} | {} | {} | {} → {} | {:.1}% | {} → {} | {:.1}% | {:+.1} | {verdict} |",
            row.change,
            row.load,
            row.phase,
            row.seconds.0,
            row.seconds.1,
            gain(row.seconds),
            digits(simulated.0),
            digits(simulated.1),
            gain(*simulated),
            judged.off(),
        );
    }
    for Judged { row, .. } in rows.iter().filter(|judged| !judged.is_as_told()) {
        eprintln!(
            "change {}, {}, {}: not as told",
            row.change, row.load, row.phase
        );
    }
    let all = rows.iter().all(Judged::is_as_told);
    Ok(ExitCode::from(u8::from(!all)))
}

/// As many digits as the published figures have.
fn digits(seconds: f64) -> String {
    if seconds < 3.0 {
        format!("{seconds:.3}")
    } else {
        format!("{seconds:.2}")
    }
}
