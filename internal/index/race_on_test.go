//go:build race

package index_test

// raceEnabled says that pools drop at random what is put into them, as the race detector makes them do.
const raceEnabled = true
