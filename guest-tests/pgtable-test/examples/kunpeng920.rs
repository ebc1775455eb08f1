// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The published figures of a Kunpeng 920 and their simulation.
//!
//! ```text
//! kunpeng920 table [DIVISOR]   prints the table of docs/simulation.md
//! kunpeng920 fit [DIVISOR]     fits the costs, from those in the cost table
//! ```
//!
//! A divisor simulates that many times less memory and multiplies the seconds. `table` defaults to
//! 1, which takes some minutes on two CPUs, and exits with code 1 if a row holds or misses against
//! the expectation; `fit` defaults to 320.

use std::process::ExitCode;

use granule_pgtable_test::software_machine::simulation::{
    cost::{self, CostTable},
    published::{FITS, JudgedRow, PublishedError, gain, judge},
};

const CPU: &str = "kunpeng920";
/// Each fit affects the earlier ones, so all are repeated.
const SWEEPS: usize = 3;

fn main() -> Result<ExitCode, PublishedError> {
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
        _ => Err("expected: kunpeng920 table [DIVISOR], or kunpeng920 fit [DIVISOR]".into()),
    }
}

fn fit(costs: &mut CostTable, divisor: u64) -> Result<(), PublishedError> {
    for sweep in 0..SWEEPS {
        for fit in &FITS {
            let best = fit.improve(costs, divisor)?;
            println!("sweep {sweep}: {} = {best}", fit.number);
        }
    }
    for fit in &FITS {
        let (published, simulated) = fit.measure(costs, divisor)?;
        println!("{}: published {published:.3}, simulated {simulated:.3}", fit.number);
    }
    Ok(())
}

fn table(costs: &CostTable, divisor: u64) -> Result<ExitCode, PublishedError> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let rows = judge(costs, divisor, threads, &|workload, kernel, seconds| {
        eprintln!("{workload}, {}: {seconds:?}", kernel.name());
    })?;
    println!(
        "| change | source, size, vCPUs | phase | published s | gain | simulated s | gain | off | |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    for judged in &rows {
        let JudgedRow { row, simulated } = judged;
        let verdict = match (row.fitted, judged.holds()) {
            (true, true) => "fitted",
            (false, true) => "holds",
            (_, false) => "**misses**",
        };
        println!(
            "| {} | {} | {} | {} → {} | {:.1}% | {} → {} | {:.1}% | {:+.1} | {verdict} |",
            row.change,
            row.workload,
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
    for JudgedRow { row, .. } in rows.iter().filter(|judged| !judged.matches_expectation()) {
        eprintln!("change {}, {}, {}: not as expected", row.change, row.workload, row.phase);
    }
    let all = rows.iter().all(JudgedRow::matches_expectation);
    Ok(ExitCode::from(u8::from(!all)))
}

/// Prints as many digits as the published figures have.
fn digits(seconds: f64) -> String {
    if seconds < 3.0 { format!("{seconds:.3}") } else { format!("{seconds:.2}") }
}
