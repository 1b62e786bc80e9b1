//! One pool of pages for all: who waits, who gives his place up, and that nobody can tell from his text.

use conformance::fake::{FakeSpec, FaultKind, FaultTrigger, InjectedFault, RunnerMethod};
use contract::{KvPool, Limits};
use decode::{Failure, FinishReason, Job, JobId, Progress, SchedulerConfig, Stats};

use crate::world::{ENDLESS, World, alone, config, greedy, job, prompt, sampled, spec};

const PAGE: usize = 8;

/// A pool of so many pages of eight positions, with chains of one node so that pages can be counted.
fn pool(pages: usize) -> FakeSpec {
    let spec = spec(ENDLESS);
    let limits = Limits {
        tree_nodes: 1,
        pool: Some(pages * PAGE),
        ..spec.limits
    };
    let pool = KvPool::for_limits(limits, PAGE);
    assert_eq!(pool.pages, pages, "a context fits and not all of them do");
    FakeSpec {
        limits,
        pool_tokens: pool.tokens(),
        page_size: PAGE,
        ..spec
    }
}

fn with_reserve(reserve: usize) -> SchedulerConfig {
    SchedulerConfig {
        reserve,
        prefill_chunk: 8,
        ..config()
    }
}

/// Steps to the end and looks at the stats after each step.
fn watch(world: &mut World, mut seen: impl FnMut(Stats)) {
    while world.step().unwrap() != Progress::Idle {
        seen(world.scheduler.stats());
    }
    let stats = world.scheduler.stats();
    assert_eq!((stats.leaks, stats.parked, stats.failed), (0, 0, 0));
    assert_eq!(stats.parkings, stats.resumed);
    assert_eq!(stats.free_tokens, stats.pool_tokens);
    assert_eq!(stats.prefix.bytes, 0, "no state of a parked one is left");
}

fn check_alone(world: &World, spec: &FakeSpec, jobs: &[Job]) {
    let said = world.said();
    for job in jobs {
        for (choice, expected) in alone(spec, job).into_iter().enumerate() {
            let found = &said[&(job.id.0, choice)];
            assert_eq!(found.ids(), expected.ids(), "{} {choice}", job.id);
            assert_eq!(found.reason, expected.reason);
        }
    }
}

#[test]
fn several_fill_the_pool_one_waits_one_is_parked_and_all_say_what_they_say_alone() {
    let spec = pool(20);
    let jobs = [
        job(0, prompt(40, 0), greedy(50)),
        job(1, prompt(44, 1), sampled(48, 7)),
        job(2, prompt(60, 2), greedy(30)),
        job(3, prompt(10, 3), sampled(10, 8)),
    ];
    let mut world = World::new(spec.clone(), with_reserve(8));
    jobs.iter().for_each(|job| world.submit(job.clone()));
    let (mut waited, mut parked, mut least) = (0, 0, usize::MAX);
    watch(&mut world, |stats| {
        waited += usize::from(stats.pool_waits && stats.queued > 0);
        parked = parked.max(stats.parked);
        least = least.min(stats.free_tokens);
    });
    check_alone(&world, &spec, &jobs);
    assert!(waited > 0);
    assert_eq!((parked, least), (1, 0));
    assert_eq!(world.started(), [0, 1, 2, 3]);
}

#[test]
fn a_pool_that_is_exactly_full_is_enough_and_one_page_less_parks_one() {
    for (pages, parkings) in [(16, 0), (15, 1)] {
        let spec = pool(pages);
        // 63 rows each in the end, which is eight pages: the last token is never read.
        let jobs = [0, 1].map(|id| job(id, prompt(40, id as u32), greedy(24)));
        let mut world = World::new(spec.clone(), with_reserve(0));
        jobs.iter().for_each(|job| world.submit(job.clone()));
        let mut least = usize::MAX;
        watch(&mut world, |stats| least = least.min(stats.free_tokens));
        check_alone(&world, &spec, &jobs);
        assert_eq!(least, 0);
        assert_eq!(world.scheduler.stats().parkings, parkings, "{pages} pages");
    }
}

#[test]
fn what_is_parked_goes_on_before_anyone_begins_and_is_not_parked_again_and_again() {
    let spec = pool(20);
    let mut jobs: Vec<Job> = (0..2)
        .map(|id| job(id, prompt(40, id as u32), greedy(50)))
        .collect();
    jobs.extend((2..9).map(|id| job(id, prompt(8, id as u32), greedy(4))));
    let mut world = World::new(spec.clone(), with_reserve(0));
    jobs[..2].iter().for_each(|job| world.submit(job.clone()));
    let mut waits_behind = 0;
    let mut late = jobs[2..].iter();
    for _ in 0..10_000 {
        let parked = world.scheduler.stats().parked;
        let began = world.started().len();
        if parked > 0
            && let Some(job) = late.next()
        {
            world.submit(job.clone());
        }
        let done = world.step().unwrap() == Progress::Idle;
        if parked > 0 && world.scheduler.stats().parked > 0 {
            assert_eq!(world.started().len(), began, "somebody overtook");
            waits_behind += world.scheduler.stats().queued;
        }
        if done && late.len() == 0 {
            break;
        }
    }
    check_alone(&world, &spec, &jobs);
    assert!(waits_behind > 0);
    assert_eq!(world.scheduler.stats().parkings, 1);
}

#[test]
fn the_place_whose_turn_comes_last_is_given_up_whoever_came_first() {
    let spec = pool(15);
    let jobs = [
        job(0, prompt(40, 0), greedy(24)),
        Job {
            priority: 5,
            ..job(1, prompt(40, 1), greedy(24))
        },
    ];
    let mut world = World::new(spec.clone(), with_reserve(0));
    jobs.iter().for_each(|job| world.submit(job.clone()));
    world.finish();
    check_alone(&world, &spec, &jobs);
    assert_eq!(world.scheduler.stats().parkings, 1);
    let ended = |id: u64| {
        let mut events = world.events.iter();
        events.rposition(|(job, _)| job.0 == id)
    };
    assert!(ended(1) < ended(0));
}

#[test]
fn choices_are_parked_one_by_one() {
    let spec = pool(20);
    let four = Job {
        choices: 4,
        ..job(0, prompt(24, 0), sampled(60, 3))
    };
    let jobs = [four, job(1, prompt(24, 1), greedy(20))];
    let mut world = World::new(spec.clone(), with_reserve(0));
    jobs.iter().for_each(|job| world.submit(job.clone()));
    let mut parked = 0;
    watch(&mut world, |stats| parked = parked.max(stats.parked));
    check_alone(&world, &spec, &jobs);
    assert!(parked >= 2, "{parked}");
}

/// One that speaks and one that reads behind it, so that the reader is parked in the middle of its prompt.
fn reader() -> (FakeSpec, [Job; 2]) {
    let jobs = [
        job(0, prompt(8, 0), greedy(88)),
        job(1, prompt(90, 1), greedy(4)),
    ];
    // Room for both when the second comes, but not once the first has spoken on while its prompt is read.
    (pool(15), jobs)
}

fn park_a_reader(world: &mut World, jobs: &[Job; 2]) {
    world.submit(jobs[0].clone());
    // It speaks for a while, then somebody begins to read whom there is hardly room for.
    for _ in 0..8 {
        world.step().unwrap();
    }
    world.submit(jobs[1].clone());
}

#[test]
fn a_prompt_half_read_is_read_on_where_it_stopped() {
    let (spec, jobs) = reader();
    let mut world = World::new(spec.clone(), with_reserve(0));
    park_a_reader(&mut world, &jobs);
    watch(&mut world, |_| ());
    check_alone(&world, &spec, &jobs);
    let stats = world.scheduler.stats();
    assert_eq!((stats.parkings, stats.prompt_tokens), (1, 98));
}

#[test]
fn a_prompt_whose_state_nobody_could_save_is_read_again() {
    let (spec, jobs) = reader();
    let mut world = World::new(spec.clone(), with_reserve(0));
    world.handle.fail(InjectedFault {
        call: RunnerMethod::Snapshot,
        when: FaultTrigger::From(0),
        kind: FaultKind::OutOfMemory,
    });
    park_a_reader(&mut world, &jobs);
    watch(&mut world, |_| ());
    check_alone(&world, &spec, &jobs);
    let stats = world.scheduler.stats();
    assert_eq!(stats.parkings, 1);
    assert!(stats.prompt_tokens > 98);
}

/// No state can be saved from here on.
fn save_nothing(world: &World) {
    world.handle.fail(InjectedFault {
        call: RunnerMethod::Snapshot,
        when: FaultTrigger::From(0),
        kind: FaultKind::OutOfMemory,
    });
}

#[test]
fn a_text_whose_state_nobody_could_save_is_read_again_and_goes_on() {
    let spec = pool(15);
    for settings in [greedy(24), sampled(24, 5)] {
        let jobs = [0, 1].map(|id| job(id, prompt(40, id as u32), settings.clone()));
        let mut world = World::new(spec.clone(), with_reserve(0));
        save_nothing(&world);
        jobs.iter().for_each(|job| world.submit(job.clone()));
        watch(&mut world, |_| ());
        check_alone(&world, &spec, &jobs);
        let stats = world.scheduler.stats();
        assert_eq!(stats.parkings, 1);
        // Both prompts, and once more the second with what it had said.
        assert!(stats.prompt_tokens > 40 + 40 + 40, "{stats:?}");
    }
}

#[test]
fn choices_whose_states_nobody_could_save_are_read_again_one_by_one() {
    let spec = pool(20);
    let three = Job {
        choices: 3,
        ..job(1, prompt(24, 1), sampled(40, 3))
    };
    let jobs = [job(0, prompt(24, 0), greedy(60)), three];
    let mut world = World::new(spec.clone(), with_reserve(0));
    jobs.iter().for_each(|job| world.submit(job.clone()));
    // Where the prompt's end is saved for the later choices, that goes well.
    while world.scheduler.stats().sequences < 4 {
        world.step().unwrap();
    }
    save_nothing(&world);
    let mut parked = 0;
    watch(&mut world, |stats| parked = parked.max(stats.parked));
    check_alone(&world, &spec, &jobs);
    assert!(parked >= 1 && world.scheduler.stats().parkings >= 2);
}

#[test]
fn a_text_that_is_read_again_can_be_cancelled_in_the_middle() {
    let spec = pool(15);
    let jobs = [0, 1].map(|id| job(id, prompt(40, id as u32), greedy(24)));
    let mut world = World::new(spec.clone(), with_reserve(0));
    save_nothing(&world);
    jobs.iter().for_each(|job| world.submit(job.clone()));
    while world.scheduler.stats().parkings == 0 || world.scheduler.stats().parked > 0 {
        world.step().unwrap();
    }
    let said = world.said()[&(1, 0)].tokens.len();
    world.scheduler.cancel(JobId(1));
    world.finish();
    check_alone(&world, &spec, &jobs[..1]);
    let cancelled = &world.said()[&(1, 0)];
    assert_eq!(cancelled.reason, Some(FinishReason::Cancelled));
    assert_eq!(cancelled.tokens.len(), said);
}

#[test]
fn a_parked_one_that_cannot_be_restored_fails_alone() {
    let spec = pool(15);
    let jobs = [0, 1].map(|id| job(id, prompt(40, id as u32), greedy(24)));
    let mut world = World::new(spec.clone(), with_reserve(0));
    world.handle.fail(InjectedFault {
        call: RunnerMethod::Restore,
        when: FaultTrigger::From(0),
        kind: FaultKind::OutOfMemory,
    });
    jobs.iter().for_each(|job| world.submit(job.clone()));
    world.finish();
    check_alone(&world, &spec, &jobs[..1]);
    assert!(matches!(
        world.failure(1),
        Some(Failure::OutOfMemory { .. })
    ));
    assert_eq!(world.scheduler.stats().prefix.bytes, 0);
}

#[test]
fn whoever_is_parked_can_be_cancelled_and_leaves_nothing_behind() {
    let (read_spec, read) = reader();
    let spoken = [0, 1].map(|id| job(id, prompt(40, id as u32), greedy(24)));
    for (spec, jobs, choice) in [
        (pool(15), &spoken, Some(0)),
        (pool(15), &spoken, None),
        (read_spec.clone(), &read, Some(0)),
        (read_spec, &read, None),
    ] {
        let mut world = World::new(spec.clone(), with_reserve(0));
        match jobs == &read {
            true => park_a_reader(&mut world, jobs),
            false => jobs.iter().for_each(|job| world.submit(job.clone())),
        }
        while world.scheduler.stats().parked == 0 {
            assert_eq!(world.step().unwrap(), Progress::Working);
        }
        match choice {
            Some(choice) => world.scheduler.cancel_choice(JobId(1), choice),
            None => world.scheduler.cancel(JobId(1)),
        }
        assert_eq!(world.scheduler.stats().parked, 0);
        world.finish();
        check_alone(&world, &spec, &jobs[..1]);
        assert_eq!(world.said()[&(1, 0)].reason, Some(FinishReason::Cancelled));
        assert_eq!(world.scheduler.stats().prefix.bytes, 0);
    }
}
