//! The path from source to result: compile, load, run, capture, time.

#![allow(clippy::unwrap_used, reason = "all of this file is a test")]

mod fixtures {
    pub mod gpu;
}

use std::thread;
use std::time::{Duration, Instant};

use cuda::launch::{Args, bandwidth, clocks};
use fixtures::gpu::Random;

#[test]
fn bandwidth_kernels_touch_every_byte() {
    let Some(gpu) = fixtures::gpu::gpu() else {
        return;
    };
    let modules = fixtures::gpu::modules(&gpu, &[bandwidth::unit()]);
    let mut random = Random::new(1);
    for words in [4, 1000, 4_194_300] {
        let host: Vec<u32> = (0..words).map(|_| random.bits() as u32).collect();
        let input = gpu.upload(&host).unwrap();
        let output = fixtures::gpu::poisoned::<u32>(&gpu, words);
        let sums = fixtures::gpu::poisoned::<u32>(&gpu, 7);
        let bytes = input.bytes() as u64;
        let copy = bandwidth::copy(input.ptr(), output.ptr(), bytes, 7);
        let read = bandwidth::read(input.ptr(), sums.ptr(), bytes, 7);
        gpu.run(&modules, &copy).unwrap();
        gpu.run(&modules, &read).unwrap();
        assert_eq!(output.download(&gpu).unwrap(), host);
        let wanted = host.iter().fold(0_u32, |a, &b| a.wrapping_add(b));
        let sums = sums.download(&gpu).unwrap();
        assert_eq!(sums.iter().fold(0_u32, |a, &b| a.wrapping_add(b)), wanted);
    }
}

#[test]
fn decode_streams_go_before_others() {
    let Some(gpu) = fixtures::gpu::gpu() else {
        return;
    };
    let usual = gpu.stream().priority().unwrap();
    let gpu = gpu.with_first_stream().unwrap();
    assert!(gpu.stream().priority().unwrap() < usual);
    assert_eq!(gpu.new_stream().unwrap().priority().unwrap(), usual);
}

#[test]
fn captured_graph_equals_direct_launches() {
    let Some(gpu) = fixtures::gpu::gpu() else {
        return;
    };
    let modules = fixtures::gpu::modules(&gpu, &[bandwidth::unit()]);
    let host = Random::new(2).normals(4096, 1.0);
    let input = gpu.upload(&host).unwrap();
    let middle = fixtures::gpu::poisoned::<f32>(&gpu, host.len());
    let output = fixtures::gpu::poisoned::<f32>(&gpu, host.len());
    let bytes = input.bytes() as u64;
    let first = bandwidth::copy(input.ptr(), middle.ptr(), bytes, 2);
    let second = bandwidth::copy(middle.ptr(), output.ptr(), bytes, 2);
    let graph = gpu
        .capture(|| {
            gpu.run(&modules, &first)?;
            gpu.run(&modules, &second)
        })
        .unwrap();
    assert_eq!(graph.nodes().unwrap(), 2);
    assert!(
        output.download(&gpu).unwrap()[0].is_nan(),
        "capturing ran it"
    );
    gpu.replay(&graph).unwrap();
    assert_eq!(output.download(&gpu).unwrap(), host);
    let eager = gpu.time_us(&modules, &[&first, &second], 3, 20).unwrap();
    let replayed = gpu
        .time_graph_us(&modules, &[&first, &second], 3, 20)
        .unwrap();
    assert!(
        replayed > 0.1 && replayed < eager,
        "{replayed} us replayed, {eager} us eager"
    );
}

#[test]
fn device_clock_advances_with_the_host_clock() {
    let Some(gpu) = fixtures::gpu::gpu() else {
        return;
    };
    let modules = fixtures::gpu::modules(&gpu, &[clocks::unit()]);
    let count = gpu.sm_count();
    let read = || {
        let out = gpu.filled::<u64>(2 * count as usize, 0).unwrap();
        let launch = clocks::read(out.ptr(), count);
        gpu.run(&modules, &launch).unwrap();
        out.download(&gpu).unwrap()
    };
    read();
    // The device clock is read within each call, which may take long beside other programs.
    let start = Instant::now();
    let before = read();
    let between = Instant::now();
    thread::sleep(Duration::from_millis(50));
    let least = between.elapsed().as_secs_f64();
    let after = read();
    let most = start.elapsed().as_secs_f64();
    let pairs = before.chunks_exact(2).zip(after.chunks_exact(2));
    let seen: Vec<_> = pairs.filter(|(a, b)| a[1] != 0 && b[1] != 0).collect();
    assert!(!seen.is_empty(), "no multiprocessor answered twice");
    for (before, after) in seen {
        let seconds = (after[1] - before[1]) as f64 / 1e9;
        assert!(
            (0.99 * least - 2e-3..=1.01 * most + 2e-3).contains(&seconds),
            "{seconds} s of {least} to {most}"
        );
        let rate = (after[0] - before[0]) as f64 / seconds;
        assert!((1e7..4e9).contains(&rate), "{rate} clocks a second");
    }
}

#[test]
fn pinned_memory_copies_both_ways() {
    let Some(gpu) = fixtures::gpu::gpu() else {
        return;
    };
    let stream = gpu.new_stream().unwrap();
    let mut pinned = gpu.pinned::<u32>(1000).unwrap();
    for (index, value) in pinned.as_mut_slice().iter_mut().enumerate() {
        *value = index as u32 * 3;
    }
    let buffer = fixtures::gpu::poisoned::<u32>(&gpu, 1000);
    gpu.sync().unwrap();
    let mut back = gpu.pinned::<u32>(1000).unwrap();
    // SAFETY: both stay alive and untouched until the wait below.
    unsafe {
        gpu.copy_to_device(&stream, buffer.ptr(), &pinned, 0..1000)
            .unwrap();
        gpu.copy_to_host(&stream, &mut back, 0..1000, buffer.ptr())
            .unwrap();
    }
    stream.sync().unwrap();
    assert_eq!(back.as_slice(), pinned.as_slice());
}

#[test]
fn wrong_arguments_are_rejected_before_the_launch() {
    let Some(gpu) = fixtures::gpu::gpu() else {
        return;
    };
    let modules = fixtures::gpu::modules(&gpu, &[bandwidth::unit()]);
    let mut launch = bandwidth::copy(0, 0, 16, 1);
    launch.args = Args::new().ptr(0).ptr(0).i32(1);
    let error = gpu.run(&modules, &launch).unwrap_err().to_string();
    assert!(
        error.contains("bandwidth_copy takes 8 bytes as argument 2"),
        "{error}"
    );
    launch.args = Args::new().ptr(0).ptr(0).u64(1).u64(1);
    let error = gpu.run(&modules, &launch).unwrap_err().to_string();
    assert!(error.contains("takes none as argument 3"), "{error}");
    let mut launch = bandwidth::copy(0, 0, 16, 1);
    launch.shared = 1 << 20;
    let error = gpu.run(&modules, &launch).unwrap_err().to_string();
    assert!(error.contains("shared memory"), "{error}");
    let mut launch = bandwidth::copy(0, 0, 16, 1);
    launch.unit = launch.unit.define("OTHER", 1);
    let error = gpu.run(&modules, &launch).unwrap_err().to_string();
    assert!(error.contains("-DOTHER=1 is not among"), "{error}");
}

#[test]
fn oversized_allocation_error_names_requested_and_free_bytes() {
    let Some(gpu) = fixtures::gpu::gpu() else {
        return;
    };
    let (free, total) = gpu.memory().unwrap();
    assert!(free <= total && total > 1 << 30);
    let error = gpu.alloc::<u8>(1 << 45).unwrap_err().to_string();
    assert!(error.contains("35184372088832 wanted"), "{error}");
}
