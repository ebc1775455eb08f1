// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

use super::*;
use crate::{
    guest,
    kernel::Kernel,
    matrix,
    options::{Matrix, Test},
};
use granule_report::render::browser::look_at;

#[test]
fn what_the_host_does_not_tell_is_shown_as_absent() {
    let row = Row {
        start_instructions: Some(1_234_567),
        boot_instructions: None,
        boot_ns: 512_000_999,
        ready_ns: Some(2_512_000_999),
        faults: None,
        levels: BTreeMap::new(),
        lines: 7,
        invalidations: 8,
        tables: Some(4 << 10),
        resident: 3 << 20,
        overhead: Some(4_096),
    };

    assert_eq!(
        row.cells().join(" | "),
        "1.234 | – | 512.000 | 2512.000 | – | 7 | 8 | 4K | 3M | 4K"
    );
}

#[test]
fn invalidations_of_stage_1_are_the_guests_own() {
    assert!(is_of_stage2("TLBI IPAS2E1IS"));
    assert!(is_of_stage2("TLBI VMALLS12E1IS"));
    assert!(!is_of_stage2("TLBI VAALE1IS"));
    assert!(!is_of_stage2("DC CIVAC"));
}

/// What a job leaves in its folder: `raw.jsonl` and `counts.jsonl`, with this many faults.
fn left_behind(faults: u64) -> Row {
    let life = format!(
        r#"{{"schema":"granule.run/1","ended":"off","marks":[[1,336209056],[2,900000000]],"phases":[
        {{"name":"start","ns":30106304,"faults":{{"by.read":0,"translation.level3":0}},"resident":[]}},
        {{"name":"boot","ns":306102752,"faults":{{"by.read":{faults},"by.write":7,
          "translation.level2":14,"translation.level3":{faults}}},"resident":[{{"4096":26107904}}]}},
        {{"name":"first-minute","ns":93224384,"faults":{{"by.write":1,"translation.level3":1}},
          "resident":[{{"4096":36966400}}],"stage2_tables":81920,"overhead":3411968}}]}}"#
    );
    let counts = format!(
        "{{\"seq\":0,\"mark\":{},\"counts\":{{\"DC CIVAC\":900000,\"instructions\":30106304}}}}\n\
         {{\"seq\":1,\"mark\":{},\"counts\":{{\"DC CIVAC\":12000,\"instructions\":290000999}}}}\n\
         {{\"seq\":2,\"mark\":{},\"counts\":{{\"DC CIVAC\":156,\"TLBI IPAS2E1IS\":305,\"TLBI VAE1\":9}}}}\n\
         {{\"end\":true,\"segments\":3}}\n",
        mark::FOREIGN,
        mark::GUEST,
        mark::GUEST_INIT
    );
    let life: Life = serde_json::from_str(&life).unwrap();
    figures(&life, &crate::counts::read_segments(&counts).unwrap()).unwrap()
}

#[test]
fn a_boots_figures_are_those_of_its_whole_run() {
    let row = left_behind(100);

    assert_eq!(
        row.cells().join(" | "),
        "30.106 | 290.000 | 306.102 | 869.893 | 108 | 912156 | 305 | 80K | 36100K | 3332K"
    );
    let levels = [("translation.level2", 14), ("translation.level3", 101)];
    assert_eq!(
        row.levels,
        levels.map(|(name, n)| (name.to_owned(), n)).into()
    );
}

/// Text and page of two guests on two kernels, one boot of which failed.
fn sample() -> (String, Verdict, String) {
    let matrix = Matrix {
        test: Test::Guest,
        vcpus: vec![1],
        seeds: 1,
        ..matrix::tests::matrix()
    };
    let jobs = &guest::jobs(&matrix)[..2];
    let kernels =
        ["base", "series"].map(|name| Kernel::planned(name.to_owned(), "Image".into(), None));
    let run = Run {
        kernels: &kernels,
        jobs,
        emulator: "QEMU 7.2",
    };
    let lost = Err("the guest died\n  | <oops>".to_owned());
    let boots = vec![
        vec![Ok(left_behind(100)), Ok(left_behind(46))],
        vec![Ok(left_behind(100)), lost],
    ];

    let (text, verdict) = table(run, &boots);
    (text, verdict, page(run, &boots))
}

#[test]
#[ignore = "takes Chromium; scripts/test runs it where that is installed"]
fn in_chromium_the_page_of_boots_is_legible() {
    look_at(&sample().2, 4);
}

#[test]
fn the_page_has_every_boot_with_what_it_cost() {
    let (text, verdict, page) = sample();

    for wanted in [
        "Boots of a guest: series against base",
        "<p class=\"verdict worse\">1 of 4 boots failed.</p>",
        "<td>306.102</td>",
        "<td>54 <small>×0.500</small></td>",
        "translation.level2 14, translation.level3 47",
        "<th>faults by level</th>",
        "80K",
        "<b>Time to init</b>",
        "<b>Time to login</b>",
        "data-marks=\"3\"",
        "on series: the guest died</summary>",
        "| &lt;oops&gt;",
        "image, SHA-256",
        "QEMU 7.2 -M virt",
    ] {
        assert!(page.contains(wanted), "{wanted}\n{page}");
    }
    assert!(!page.contains("<script") && !page.contains("http"));
    assert_eq!(verdict, Verdict::Failed);
    assert_eq!(
        text.lines()
            .filter(|line| line.starts_with("| guest-"))
            .count(),
        3,
        "{text}"
    );
    assert!(text.starts_with("| guest | kernel | start M instr. |"));
}
