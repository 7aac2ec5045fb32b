"""What a model needs and how fast it steps on machines that nobody has rented yet: memory, step times, a
recommendation.
"""
